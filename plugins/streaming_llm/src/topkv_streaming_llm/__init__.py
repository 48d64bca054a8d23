"""StreamingLLM's attention sinks and recent window for topkv."""
