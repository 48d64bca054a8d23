"""Configuration in two layers: ``SparseConfig`` of a user, and ``LoweredConfig`` for plugins.

A ``SparseConfig`` holds the settings of the user alone. ``lower`` fills in the rest, for one
model on one device, checks everything before anything is allocated, and keeps where each
value came from.

Reading order: ``settings`` (every setting, once, with its check from ``topkv.checks``; ``stages``
has those that name plugins, ``files`` reads them), ``lowering`` and its result ``lowered``, the
``sources`` of values, the plan of each layer (``layers``, ``plans``), and the checks against
plugins (``negotiation``) and of ``sizes``.
Names load on first use: ``negotiation`` imports no torch, for those who list what is installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from topkv.config.lowered import LoweredConfig as LoweredConfig
    from topkv.config.lowered import LoweredGroup as LoweredGroup
    from topkv.config.lowering import lower as lower
    from topkv.config.settings import SparseConfig as SparseConfig
    from topkv.config.sources import Setting as Setting

_LAZY = {
    "LoweredConfig": "lowered",
    "LoweredGroup": "lowered",
    "Setting": "sources",
    "SparseConfig": "settings",
    "lower": "lowering",
}

__all__ = ["LoweredConfig", "LoweredGroup", "Setting", "SparseConfig", "lower"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"topkv.config.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'topkv.config' has no attribute {name!r}")
