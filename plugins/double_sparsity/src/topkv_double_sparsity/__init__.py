"""Double Sparsity token selection for topkv."""
