"""FlashAttention as an attention backend of topkv."""
