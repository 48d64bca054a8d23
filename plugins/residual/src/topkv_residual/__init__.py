"""An estimate of what a selection leaves out, a stage for topkv."""
