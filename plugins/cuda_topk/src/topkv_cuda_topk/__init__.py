"""Exact top-k for topkv in CUDA C++."""
