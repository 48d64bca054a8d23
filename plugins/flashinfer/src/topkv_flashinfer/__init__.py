"""FlashInfer as an attention backend of topkv."""
