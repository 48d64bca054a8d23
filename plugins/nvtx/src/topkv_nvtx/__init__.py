"""An observer of topkv that marks forwards with NVTX ranges."""
