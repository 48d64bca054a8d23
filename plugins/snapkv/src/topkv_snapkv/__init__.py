"""SnapKV prompt compression for topkv."""
