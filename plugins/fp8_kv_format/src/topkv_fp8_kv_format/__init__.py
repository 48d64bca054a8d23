"""The KV format ``fp8`` of topkv: latent rows of 656 bytes on both tiers."""
