"""Entry of the plugin, through which topkv finds the stage ``top_p``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@hookimpl
def topkv_register_stages() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="top_p",
            kind="stage",
            factories={
                "reference": "topkv_top_p.stage:TopP",
                "triton": "topkv_top_p.launch:TopPTriton",
            },
            hook_api=(2, 1),
            capabilities=Capabilities(
                units=(1, 128),
                scopes=("kv_head", "shared"),
                # Not attends: it drops. Not nested, not scale_free: a softmax over candidates.
                traits=("exact_update", "head_equivariant", "value_free", "incremental"),
            ),
            parameters={"p": 0.85, "widen": 1, "outliers": 4},
        )
    ]
