"""Blocks by compressed keys, as in InfLLM-v2."""
