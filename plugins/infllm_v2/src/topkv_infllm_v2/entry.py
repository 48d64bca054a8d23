"""Entry of the plugin, through which topkv finds the algorithm ``infllm_v2``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@hookimpl
def topkv_register_algorithms() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="infllm_v2",
            kind="algorithm",
            factories={
                "reference": "topkv_infllm_v2.algorithm:InfLLMv2",
                "triton": "topkv_infllm_v2.launch:InfLLMv2Triton",
            },
            hook_api=(2, 0),
            capabilities=Capabilities(
                units=(2, 256),
                scopes=("kv_head", "shared"),
                # Not scale_free: a sum of softmaxes. Not attends: a key in the first part of a
                # unit is as good for the unit before, with which it shares a window.
                traits=(
                    "nested",
                    "exact_update",
                    "low_ties",
                    "head_equivariant",
                    "incremental",
                    "value_free",
                ),
            ),
            defaults={"unit": 64, "scope": "kv_head", "dense_layers": (0, 1)},
            parameters={"stride": 16, "sink_units": 1, "recent_units": 0},
        )
    ]
