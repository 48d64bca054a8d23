"""ClusterKV semantic cluster selection for topkv."""
