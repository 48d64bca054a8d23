"""Entry of the plugin, through which topkv finds the stage ``head_sparsity``."""

from __future__ import annotations

from attrs import field, frozen

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry
from topkv_authoring.parameters import FLOATS, SHARE


@frozen
class HeadParams:
    """Parameters.

    Attributes:
        threshold: a lane is flat whose largest share of attention is below it; with 1 none is.
        head_budget: share of the selection that a flat lane keeps.
    """

    threshold: float = field(default=0.7, validator=SHARE)
    head_budget: float = field(default=0.25, validator=SHARE)


@hookimpl
def topkv_register_stages() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="head_sparsity",
            kind="stage",
            factories={
                "reference": "topkv_head_sparsity.stage:HeadSparsity",
                "triton": "topkv_head_sparsity.launch:HeadSparsityTriton",
            },
            hook_api=(3, 0),
            capabilities=Capabilities(
                units=(1, 128),
                scopes=("kv_head", "shared"),
                dtypes=FLOATS,
                # Not attends, nested or scale_free: a flat lane drops, and what is flat depends on
                # the size of logits.
                traits=("exact_update", "head_equivariant", "value_free", "incremental"),
            ),
            parameters=HeadParams,
        )
    ]
