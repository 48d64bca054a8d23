"""A storage of topkv: pages in a directory, which several processes may share."""
