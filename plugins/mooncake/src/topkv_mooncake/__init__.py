"""Mooncake Store as a storage of topkv: pages in the memory of other machines."""
