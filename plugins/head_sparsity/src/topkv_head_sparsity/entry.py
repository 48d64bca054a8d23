"""Entry of the plugin, through which topkv finds the stage ``head_sparsity``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@hookimpl
def topkv_register_stages() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="head_sparsity",
            kind="stage",
            factories={
                "reference": "topkv_head_sparsity.stage:HeadSparsity",
                "triton": "topkv_head_sparsity.launch:HeadSparsityTriton",
            },
            hook_api=(2, 1),
            capabilities=Capabilities(
                units=(1, 128),
                scopes=("kv_head", "shared"),
                # Not attends, nested or scale_free: a flat lane drops, and what is flat depends on
                # the size of logits.
                traits=("exact_update", "head_equivariant", "value_free", "incremental"),
            ),
            parameters={"threshold": 0.7, "head_budget": 0.25},
        )
    ]
