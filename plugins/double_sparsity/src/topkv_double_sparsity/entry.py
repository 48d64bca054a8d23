"""Entry of the plugin, through which topkv finds the algorithm ``double_sparsity``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@hookimpl
def topkv_register_algorithms() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="double_sparsity",
            kind="algorithm",
            factories={
                "reference": "topkv_double_sparsity.algorithm:DoubleSparsity",
                "triton": "topkv_double_sparsity.launch:DoubleSparsityTriton",
            },
            hook_api=(2, 0),
            capabilities=Capabilities(
                units=(1, 1),
                scopes=("kv_head", "shared"),
                attention=("gqa", "mla"),
                # Promised for the default parameters. Not scale_free: a mean of softmaxes. Not
                # exact_update: without a calibration file the first chunk chooses the channels.
                traits=(
                    "attends",
                    "nested",
                    "low_ties",
                    "head_equivariant",
                    "incremental",
                    "value_free",
                ),
            ),
            # Rows of scores are tokens; topkv-triton-topk is made for rows so long.
            defaults={"unit": 1, "scope": "kv_head", "dense_layers": (0, 1), "topk": "pivot"},
            parameters={
                "channels": None,
                "label": "int4",
                "calibration": None,
                "statistic": None,
                "pair_channels": False,
                "sink_tokens": 0,
                "sticky": 0.0,
                # Gone; still here so that the factory can say what took their place.
                "head_sparsity": None,
                "head_budget": None,
            },
        )
    ]
