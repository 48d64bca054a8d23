"""Entry of this package, read by topkv; imports neither torch nor triton."""

from __future__ import annotations

from attrs import frozen

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@frozen
class MinimalAlgorithmParams:
    """Parameters.

    Attributes:
        sink_units: first units, which every selection holds.
    """

    sink_units: int = 1


@hookimpl
def topkv_register_algorithms() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="minimal",
            kind="algorithm",
            factories={
                "reference": "topkv_minimal.algorithm:MinimalAlgorithm",
            },
            hook_api=(3, 0),
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
            parameters=MinimalAlgorithmParams,
        )
    ]
