"""Quest page selection for topkv."""
