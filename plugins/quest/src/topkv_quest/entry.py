"""Entry of the plugin, through which topkv finds the algorithm ``quest``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@hookimpl
def topkv_register_algorithms() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="quest",
            kind="algorithm",
            factories={
                "reference": "topkv_quest.quest:Quest",
                "triton": "topkv_quest.quest:QuestKernels",
            },
            hook_api=(2, 0),
            capabilities=Capabilities(
                units=(1, 128),
                scopes=("kv_head", "shared"),
                attention=("gqa", "mla"),
                queries=8,
                # Not scale_free: a mean of softmaxes.
                traits=(
                    "attends",
                    "nested",
                    "exact_update",
                    "low_ties",
                    "head_equivariant",
                    "incremental",
                    "value_free",
                ),
            ),
            defaults={"unit": 16, "scope": "kv_head", "dense_layers": (0, 1)},
            parameters={"metadata": "bf16", "sink_units": 1, "sticky": 0.0},
        )
    ]
