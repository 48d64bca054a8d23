"""Entry of the plugin, through which topkv finds the stage ``keydiff``."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry
from topkv_authoring.parameters import FLOATS


@frozen
class KeyDiffParams:
    """Parameters, those of ``topkv.hooks.stage.Keeping``.

    Attributes:
        tokens: tokens that stay when pages are given back.
        every: pages are given back when a request that decodes has this many more.
        first: tokens at the beginning that always stay.
        recent: newest tokens that always stay.
    """

    tokens: int = field(default=4096, validator=ge(1))
    every: int = field(default=256, validator=ge(1))
    first: int = field(default=64, validator=ge(0))
    recent: int = field(default=512, validator=ge(0))


@hookimpl
def topkv_register_stages() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="keydiff",
            kind="stage",
            factories={
                "reference": "topkv_keydiff.stage:KeyDiff",
                "triton": "topkv_keydiff.kernels:KeyDiffKernels",
            },
            hook_api=(3, 0),
            capabilities=Capabilities(
                units=(1, 128),
                scopes=("kv_head", "shared"),
                queries=None,
                dtypes=FLOATS,
                traits=("exact_update", "head_equivariant", "value_free"),
            ),
            parameters=KeyDiffParams,
        )
    ]
