"""FlashMLA as an attention backend of topkv."""
