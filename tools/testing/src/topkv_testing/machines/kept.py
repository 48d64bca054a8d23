"""Coordinators that keep the pages of prompts, on doubles."""

from __future__ import annotations

from typing import Any

from topkv_prefixes.prefixes import PrefixCoordinator
from topkv_testing.machines.lifecycle_model import make_coordinator
from topkv_testing.tiers import Tier


def make_kept(on: Tier, **options: Any) -> PrefixCoordinator:
    """``make_coordinator`` with all pages published unless the options say otherwise."""
    made = make_coordinator(on, **{"prefix_cache": "all", **options})
    if not isinstance(made, PrefixCoordinator):
        raise TypeError("prefix_cache is off, so that nothing keeps pages")
    return made
