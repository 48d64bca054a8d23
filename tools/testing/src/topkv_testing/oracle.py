"""The path of ``models/oracle.py`` for tests of plugins."""

from topkv_testing.models.oracle import LaneModel, attention

__all__ = ["LaneModel", "attention"]
