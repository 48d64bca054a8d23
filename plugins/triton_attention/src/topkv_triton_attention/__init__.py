"""Triton attention over the device buffer of topkv."""
