"""Twilight's pruning of a selection to the units that hold most of its attention, for topkv."""
