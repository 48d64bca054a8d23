"""Tasks beside RULER's, and sets of tasks with a property."""

from __future__ import annotations

from collections.abc import Mapping

from topkv_evaluation.tasks.near_keys import NearKeys
from topkv_evaluation.tasks.needles import Needles
from topkv_evaluation.tasks.plain import Copy, Lookup
from topkv_evaluation.tasks.ruler import MADE, Generator
from topkv_evaluation.tasks.walk import Walk

OWN: Mapping[str, Generator] = {
    "near_keys": NearKeys(),
    "walk": Walk(),
    "four_digits": Needles("text", digits=4),
    "lookup": Lookup(),
    "copy": Copy(),
}
"""Generators by the word of ``--tasks``."""

SCORINGS: Mapping[str, str] = {
    "near_keys": "all",
    "walk": "order",
    "four_digits": "all",
    "lookup": "starts",
    "copy": "order",
}

SWEPT: Mapping[str, Needles | NearKeys] = {
    **{
        f"ruler:{name}": task
        for name, task in MADE.items()
        if isinstance(task, Needles) and task.values * task.queries == 1
    },
    "near_keys": OWN["near_keys"],  # type: ignore[dict-item]
    "four_digits": OWN["four_digits"],  # type: ignore[dict-item]
}
"""Tasks that ask for one needle, which can stand at a depth that is asked for."""
