"""The part of ``topkv_testing.stages`` that is about stages alone: ``refine`` and ``correct``."""
