"""Entry of the plugin, through which topkv finds the algorithm ``pqcache``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@hookimpl
def topkv_register_algorithms() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="pqcache",
            kind="algorithm",
            factories={
                "reference": "topkv_pqcache.algorithm:PQCache",
                "triton": "topkv_pqcache.launch:PQCacheTriton",
            },
            hook_api=(2, 0),
            capabilities=Capabilities(
                units=(1, 1),
                scopes=("kv_head", "shared"),
                dtypes=("float16", "bfloat16", "float32"),
                # Not scale_free: a mean of softmaxes. Not exact_update: prompts and windows of
                # decoded tokens train other codebooks.
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
                "subvectors": 4,
                "bits": 6,
                "segment": 8192,
                "window": 1024,
                "iterations": 10,
                "seed": 0,
                "sink_units": None,
                "recent_units": None,
                "sticky": 0.0,
            },
        )
    ]
