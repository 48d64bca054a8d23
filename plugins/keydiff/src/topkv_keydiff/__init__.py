"""Pages whose keys are like all others go first: a stage for topkv."""
