"""Entry of the plugin, through which topkv finds the algorithm ``trained_gate``."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry
from topkv_authoring.parameters import FLOATS, RANKED


@frozen
class GateParams:
    """Parameters.

    Attributes:
        local: newest units that are always attended, the open one included.
    """

    local: int = field(default=1, validator=ge(1))


@hookimpl
def topkv_register_algorithms() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="trained_gate",
            kind="algorithm",
            factories={
                "reference": "topkv_trained_gate.algorithm:TrainedGate",
                "triton": "topkv_trained_gate.launch:TrainedGateTriton",
            },
            hook_api=(3, 0),
            capabilities=Capabilities(
                units=(1, 256),
                scopes=("kv_head",),
                queries=8,
                needs_index=True,
                dtypes=FLOATS,
                traits=("attends", "scale_free", "exact_update", *RANKED),
            ),
            defaults={
                "unit": 128,
                "scope": "kv_head",
                "dense_layers": (),
                "budget": 2048,
                "page_tokens": 128,
            },
            parameters=GateParams,
        )
    ]
