"""Entry of the plugin, through which topkv finds the algorithm ``infllm_v2``."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry
from topkv_authoring.parameters import FLOATS, RANKED


@frozen
class WindowParams:
    """Parameters.

    Attributes:
        stride: tokens of a part, half a window; divides the unit.
        sink_units: first units, which every selection holds.
        recent_units: closed units before the open one, likewise.
    """

    stride: int = field(default=16, validator=ge(1))
    sink_units: int = 1
    recent_units: int = 0


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
            hook_api=(3, 0),
            capabilities=Capabilities(
                units=(2, 256),
                scopes=("kv_head", "shared"),
                queries=8,
                dtypes=FLOATS,
                # Not scale_free: a sum of softmaxes. Not attends: a key in the first part of a
                # unit is as good for the unit before, with which it shares a window.
                traits=("exact_update", "head_equivariant", *RANKED),
            ),
            defaults={"unit": 64, "scope": "kv_head", "dense_layers": (0, 1)},
            parameters=WindowParams,
        )
    ]
