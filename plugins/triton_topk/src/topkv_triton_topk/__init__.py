"""Exact top-k of long rows in Triton for topkv."""
