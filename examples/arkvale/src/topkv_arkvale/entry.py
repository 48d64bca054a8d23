"""Entry of this package, read by topkv."""

from __future__ import annotations

from attrs import field, frozen

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry
from topkv_authoring.parameters import BONUS


@frozen
class ArkValeParams:
    """Parameters.

    Attributes:
        sink_units: first units, which every selection holds.
        sticky: bonus of units that are on the device, in natural logarithms.
    """

    sink_units: int = 1
    sticky: float = field(default=0.0, validator=BONUS)


@hookimpl
def topkv_register_algorithms() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="arkvale",
            kind="algorithm",
            factories={
                "reference": "topkv_arkvale.algorithm:ArkVale",
                "triton": "topkv_arkvale.algorithm:ArkValeKernels",
            },
            hook_api=(3, 0),
            capabilities=Capabilities(
                units=(1, 128),
                scopes=("kv_head", "shared"),
                tiers=("cpu", "interpret"),
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
            defaults={"unit": 32, "scope": "kv_head", "dense_layers": (0, 1)},
            parameters=ArkValeParams,
        )
    ]
