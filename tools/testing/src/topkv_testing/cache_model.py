"""The path of ``models/cache_model.py`` for tests of plugins."""

from topkv_testing.models.cache_model import PageModel, RequestModel, Write, ceil_div

__all__ = ["PageModel", "RequestModel", "Write", "ceil_div"]
