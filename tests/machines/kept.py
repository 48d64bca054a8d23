"""Coordinators that keep the pages of prompts, on doubles."""

from __future__ import annotations

from typing import Any

from topkv import SparseCoordinator
from topkv_testing.machines.lifecycle_model import make_coordinator
from topkv_testing.tiers import Tier


def keeping(**params: Any) -> dict[str, Any]:
    """The setting ``pages`` by which ``prefixes`` keeps pages, ``keep: all`` by default."""
    return {"name": "prefixes", "params": {"keep": "all", **params}}


def make_kept(on: Tier, params: Any = (), **options: Any) -> SparseCoordinator:
    """``make_coordinator`` with ``pages: prefixes``.

    Args:
        on: where it runs.
        params: of ``prefixes``, above ``keep: all``.
        options: of ``SparseConfig``.
    """
    return make_coordinator(on, pages=keeping(**dict(params)), **options)
