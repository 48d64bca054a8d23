"""An observer of topkv that serves counts to Prometheus."""
