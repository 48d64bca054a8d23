"""The path of ``models/doubles.py`` for tests of plugins."""

from topkv.testing.models.doubles import COMPETING, GATHER, SCRIPTED, Entries, Gather, Scripted

__all__ = ["COMPETING", "GATHER", "SCRIPTED", "Entries", "Gather", "Scripted"]
