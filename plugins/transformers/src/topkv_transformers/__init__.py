"""Transformers models decoding through topkv."""
