"""Entry of the plugin, through which topkv finds the algorithm ``quest``."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import in_

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry
from topkv_authoring.parameters import BONUS, FLOATS, RANKED


@frozen
class QuestParams:
    """Parameters.

    Attributes:
        metadata: bounds are ``"bf16"``, of the model's own 16-bit dtype, or ``"int8"``.
        sink_units: first units, which every selection holds.
        sticky: bonus of units that are on the device, in natural logarithms.
    """

    metadata: str = field(default="bf16", validator=in_(("bf16", "int8")))
    sink_units: int = 1
    sticky: float = field(default=0.0, validator=BONUS)


@hookimpl
def topkv_register_algorithms() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="quest",
            kind="algorithm",
            factories={
                "reference": "topkv_quest.quest:Quest",
                "triton": "topkv_quest.quest:QuestKernels",
            },
            hook_api=(3, 0),
            capabilities=Capabilities(
                units=(1, 128),
                scopes=("kv_head", "shared"),
                dtypes=FLOATS,
                attention=("gqa", "mla"),
                queries=8,
                # Not scale_free: a mean of softmaxes.
                traits=("attends", "exact_update", "head_equivariant", *RANKED),
            ),
            defaults={"unit": 16, "scope": "kv_head", "dense_layers": (0, 1)},
            parameters=QuestParams,
        )
    ]
