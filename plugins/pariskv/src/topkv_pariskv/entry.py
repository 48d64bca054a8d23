"""Entry of the plugin, through which topkv finds the algorithm ``pariskv``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@hookimpl
def topkv_register_algorithms() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="pariskv",
            kind="algorithm",
            factories={
                "reference": "topkv_pariskv.algorithm:ParisKV",
                "triton": "topkv_pariskv.launch:ParisKVTriton",
            },
            hook_api=(2, 0),
            capabilities=Capabilities(
                units=(1, 1),
                scopes=("kv_head", "shared"),
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
            # Rows of scores are tokens; topkv-triton-topk is made for rows so long.
            defaults={"unit": 1, "scope": "kv_head", "dense_layers": (0, 1), "topk": "pivot"},
            parameters={
                "sink_units": None,
                "recent_units": None,
                "sticky": 0.0,
                "outliers": 4,
            },
        )
    ]
