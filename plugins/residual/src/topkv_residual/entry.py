"""Entry of the plugin, through which topkv finds the stage ``residual``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry
from topkv_authoring.parameters import FLOATS


@hookimpl
def topkv_register_stages() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="residual",
            kind="stage",
            factories={
                "reference": "topkv_residual.stage:Residual",
                "triton": "topkv_residual.launch:ResidualTriton",
            },
            hook_api=(3, 0),
            capabilities=Capabilities(
                units=(1, 128),
                scopes=("kv_head", "shared"),
                queries=8,
                dtypes=FLOATS,
                traits=("exact_update", "head_equivariant"),
            ),
        )
    ]
