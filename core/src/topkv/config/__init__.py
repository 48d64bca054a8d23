"""Configuration in two layers: what a user writes, and what plugins receive.

``SparseConfig`` holds what the user set and nothing else. ``lower`` fills in the rest, for one
model on one device, checks everything before anything is allocated, and keeps where each
value came from.
"""

from __future__ import annotations

from topkv.config.lowered import LoweredConfig as LoweredConfig
from topkv.config.lowered import LoweredGroup as LoweredGroup

from topkv.config.lowering import lower as lower
from topkv.config.settings import SparseConfig as SparseConfig
from topkv.config.sources import Setting as Setting

__all__ = ["LoweredConfig", "LoweredGroup", "Setting", "SparseConfig", "lower"]
