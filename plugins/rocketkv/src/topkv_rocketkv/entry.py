"""Entry of the plugin, through which topkv finds the algorithm ``rocketkv``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@hookimpl
def topkv_register_algorithms() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="rocketkv",
            kind="algorithm",
            factories={
                "reference": "topkv_rocketkv.algorithm:RocketKV",
                "triton": "topkv_rocketkv.launch:RocketKVTriton",
            },
            hook_api=(2, 5),
            capabilities=Capabilities(
                units=(1, 128),
                scopes=("kv_head", "shared"),
                max_group=64,
                # Neither attends nor low_ties: a prompt's votes may drop the unit that would win.
                traits=("exact_update", "head_equivariant", "value_free"),
            ),
            defaults={"unit": 4, "scope": "kv_head"},
            parameters={
                "window": 32,
                "kernel": 63,
                "generated": 256,
                "prompt_budget": None,
                "channels": None,
                "sticky": 0.0,
            },
        )
    ]
