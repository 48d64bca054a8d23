"""``topkv share``: which layers of a model should select, and which should share a selection."""
