"""Transformers models decoding through topkv."""

from __future__ import annotations

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""A small trained model with its tokenizer and card: it answers facts planted in long texts."""
