"""Entry of the plugin, through which topkv finds the stage ``top_p``."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry
from topkv_authoring.parameters import FLOATS, PAIRS, SHARE


@frozen
class TopPParams:
    """Parameters.

    Attributes:
        p: share of the attention that the kept candidates of a lane have.
        widen: candidates for each unit of a selection.
        outliers: most pairs of channels of a key that are kept by themselves.
    """

    p: float = field(default=0.85, validator=SHARE)
    widen: int = field(default=1, validator=ge(1))
    outliers: int = field(default=4, validator=PAIRS)


@hookimpl
def topkv_register_stages() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="top_p",
            kind="stage",
            factories={
                "reference": "topkv_top_p.stage:TopP",
                "triton": "topkv_top_p.launch:TopPTriton",
            },
            hook_api=(3, 0),
            capabilities=Capabilities(
                units=(1, 128),
                scopes=("kv_head", "shared"),
                queries=8,
                dtypes=FLOATS,
                # Not attends: it drops. Not nested, not scale_free: a softmax over candidates.
                traits=("exact_update", "head_equivariant", "value_free", "incremental"),
            ),
            parameters=TopPParams,
        )
    ]
