"""What this package offers to topkv."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import PluginEntry


@hookimpl
def topkv_register_engines() -> list[PluginEntry]:
    return [PluginEntry("transformers", "engine", "topkv_transformers.engine:TransformersEngine")]
