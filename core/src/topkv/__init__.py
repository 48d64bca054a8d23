"""Pluggable sparse attention over a tiered KV cache.

The public names load on first use, so that ``import topkv`` stays cheap and a plugin's entry
module imports neither torch nor triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from topkv.plugins.discovery import hookimpl as hookimpl
from topkv.version import VERSION

if TYPE_CHECKING:
    from topkv._attach import attach as attach
    from topkv.config import SparseConfig as SparseConfig
    from topkv.coordinator import SparseCoordinator as SparseCoordinator

__version__ = VERSION

_LAZY = {
    "attach": "topkv._attach",
    "SparseConfig": "topkv.config",
    "SparseCoordinator": "topkv.coordinator",
}

__all__ = ["SparseConfig", "SparseCoordinator", "attach", "hookimpl"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'topkv' has no attribute {name!r}")
