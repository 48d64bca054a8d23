"""ArkVale's page digests for topkv."""
