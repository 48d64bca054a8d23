"""DeepSeek Sparse Attention's lightning indexer for topkv."""
