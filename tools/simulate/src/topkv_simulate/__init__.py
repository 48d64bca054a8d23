"""Selections of a running model, recorded once and replayed over buffers and eviction policies."""

from __future__ import annotations
