"""Selection by mean keys, an algorithm for topkv."""
