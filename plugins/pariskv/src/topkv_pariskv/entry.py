"""Entry of the plugin, through which topkv finds the algorithm ``pariskv``."""

from __future__ import annotations

from attrs import field, frozen

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry
from topkv_authoring.parameters import BONUS, FLOATS, PAIRS, RANKED


@frozen
class ParisParams:
    """Parameters.

    Attributes:
        sink_units: first tokens, which every selection holds; None for a twelfth of it, 4 at most.
        recent_units: newest closed tokens, likewise; None for a sixth, 8 at most.
        sticky: bonus of tokens that are on the device, in natural logarithms.
        outliers: most pairs of channels of a key that are kept by themselves.
    """

    sink_units: int | None = None
    recent_units: int | None = None
    sticky: float = field(default=0.0, validator=BONUS)
    outliers: int = field(default=4, validator=PAIRS)


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
            hook_api=(3, 0),
            capabilities=Capabilities(
                units=(1, 1),
                scopes=("kv_head", "shared"),
                queries=8,
                dtypes=FLOATS,
                # Not scale_free: a mean of softmaxes.
                traits=("attends", "exact_update", "head_equivariant", *RANKED),
            ),
            # Rows of scores are tokens; topkv-triton-topk is made for rows so long.
            defaults={"unit": 1, "scope": "kv_head", "dense_layers": (0, 1), "topk": "pivot"},
            parameters=ParisParams,
        )
    ]
