"""Smaller selections where attention is flat, a stage for topkv."""
