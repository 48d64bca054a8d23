"""ParisKV's sign codes of rotated keys for topkv."""
