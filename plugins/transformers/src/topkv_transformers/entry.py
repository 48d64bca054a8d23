"""Entry of the plugin, through which topkv finds the engine ``transformers``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@hookimpl
def topkv_register_engines() -> list[PluginEntry]:
    # It has no kernels of its own. Those below it are interpreted in their own suites; under whole
    # models the interpreter takes minutes.
    tiers = Capabilities(tiers=("cpu", "gpu"))
    factory = "topkv_transformers.engine:TransformersEngine"
    return [PluginEntry("transformers", "engine", factory, hook_api=(3, 0), capabilities=tiers)]
