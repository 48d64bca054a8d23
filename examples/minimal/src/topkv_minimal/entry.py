"""Entry of this package, read by topkv; imports neither torch nor triton."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@hookimpl
def topkv_register_algorithms() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="minimal",
            kind="algorithm",
            factories={
                "reference": "topkv_minimal.algorithm:MinimalAlgorithm",
            },
            hook_api=(2, 7),
            capabilities=Capabilities(
                units=(1, 128),
                scopes=("kv_head", "shared"),
                capture=False,
                tiers=("cpu",),
                traits=(
                    "attends",
                    "nested",
                    "scale_free",
                    "low_ties",
                    "head_equivariant",
                    "incremental",
                    "value_free",
                ),
            ),
            defaults={"unit": 16, "scope": "kv_head"},
            parameters={"sink_units": 1},
        )
    ]
