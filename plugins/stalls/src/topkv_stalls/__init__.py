"""An observer of topkv that times how long each layer waits for its loads."""
