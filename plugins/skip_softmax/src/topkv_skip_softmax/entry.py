"""Entry of the plugin, through which topkv finds the stage ``skip_softmax``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@hookimpl
def topkv_register_stages() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="skip_softmax",
            kind="stage",
            factories="topkv_skip_softmax.stage:SkipSoftmax",
            hook_api=(2, 2),
            capabilities=Capabilities(options=("skip_softmax",)),
            parameters={"factor": 1.0},
        )
    ]
