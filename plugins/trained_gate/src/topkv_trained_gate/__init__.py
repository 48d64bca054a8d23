"""MiniMax-M3's block index for topkv."""
