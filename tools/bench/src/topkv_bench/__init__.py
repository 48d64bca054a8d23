"""``topkv bench``: decoding with random weights, measured beside dense and offloaded caches."""
