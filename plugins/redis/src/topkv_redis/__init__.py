"""Redis as a storage of topkv: pages in the memory of a server."""
