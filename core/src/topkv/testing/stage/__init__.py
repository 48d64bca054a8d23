"""The part of ``topkv.testing.stages`` that is about stages alone: ``refine`` and ``correct``."""
