"""Pages that queries to come look away from go first: a stage for topkv."""
