"""Evaluation of attached models of Transformers: commands, prompts, trained models."""

from __future__ import annotations

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""A small trained model with its tokenizer and card: it answers facts planted in long texts."""

DEEP_CHECKPOINT = Path(__file__).parent / "deep_checkpoint"
"""A model of eight layers and heads of 128 channels: it follows variables and walks, too."""

DSA_CHECKPOINT = Path(__file__).parent / "dsa_checkpoint"
"""A small DeepSeek-V3.2, whose indexer was trained to select 256 tokens."""
