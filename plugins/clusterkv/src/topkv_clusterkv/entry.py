"""Entry of the plugin, through which topkv finds the algorithm ``clusterkv``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@hookimpl
def topkv_register_algorithms() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="clusterkv",
            kind="algorithm",
            factories={
                "reference": "topkv_clusterkv.algorithm:ClusterKV",
                "triton": "topkv_clusterkv.launch:ClusterKVTriton",
            },
            hook_api=(2, 0),
            capabilities=Capabilities(
                units=(1, 1),
                scopes=("kv_head",),
                dtypes=("float16", "bfloat16", "float32"),
                # Not scale_free: a mean of softmaxes. Not exact_update: decoded tokens are
                # clustered by windows. Not low_ties: the lower of two tied clusters may hold
                # the higher tokens.
                traits=("attends", "nested", "head_equivariant", "incremental", "value_free"),
            ),
            defaults={"unit": 1, "scope": "kv_head", "dense_layers": (0, 1)},
            parameters={
                "tokens_per_cluster": 16,
                "window": 320,
                "segment": 8192,
                "sinks": 16,
                "iterations": 10,
                "seed": 0,
            },
        )
    ]
