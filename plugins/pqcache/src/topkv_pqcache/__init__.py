"""PQCache's product quantisation of keys for topkv."""
