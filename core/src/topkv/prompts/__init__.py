"""Prompts: chunks that attend to their history, and history that is fetched ahead.

Read ``prefill`` first.
"""
