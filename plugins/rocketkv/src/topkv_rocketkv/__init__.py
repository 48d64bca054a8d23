"""RocketKV for topkv: a prompt's votes, then selection by a few channels of bounds."""
