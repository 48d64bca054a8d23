"""The path of ``models/doubles.py`` for tests of plugins."""

from topkv_testing.models.doubles import (
    COMPETING,
    GATHER,
    LATENT_FP8,
    SCRIPTED,
    Entries,
    Gather,
    Scripted,
    ScriptedParams,
)
from topkv_testing.models.stage_doubles import KEEP, KEEP_KEYS, RERANK, TO_UNITS
from topkv_testing.models.storage_doubles import SHELF

__all__ = [
    "COMPETING",
    "GATHER",
    "KEEP",
    "KEEP_KEYS",
    "LATENT_FP8",
    "RERANK",
    "SCRIPTED",
    "SHELF",
    "TO_UNITS",
    "Entries",
    "Gather",
    "Scripted",
    "ScriptedParams",
]
