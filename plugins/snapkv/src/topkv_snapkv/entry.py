"""Entry of the plugin, through which topkv finds the algorithm ``snapkv``."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, in_

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry
from topkv_authoring.parameters import FLOATS, odd


@frozen
class SnapParams:
    """Parameters.

    Attributes:
        window: W, the last prompt tokens: they vote, and are always kept.
        kernel: tokens whose largest vote a token gets.
        generated: places for tokens behind the prompt.
        outgrow: ``"refuse"`` further ones, or let them ``"slide"``: the newest are attended.
    """

    window: int = field(default=64, validator=ge(1))
    kernel: int = field(default=7, validator=[ge(1), odd])
    generated: int = field(default=256, validator=ge(1))
    outgrow: str = field(default="refuse", validator=in_(("refuse", "slide")))

    @property
    def slide(self) -> bool:
        return self.outgrow == "slide"


@hookimpl
def topkv_register_algorithms() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="snapkv",
            kind="algorithm",
            factories={
                "reference": "topkv_snapkv.algorithm:SnapKV",
                "triton": "topkv_snapkv.kernels:SnapKVTriton",
            },
            hook_api=(3, 0),
            capabilities=Capabilities(
                units=(1, 1),
                scopes=("kv_head", "shared"),
                queries=None,
                dtypes=FLOATS,
                traits=("nested", "scale_free", "head_equivariant", "value_free"),
            ),
            defaults={"unit": 1, "scope": "kv_head"},
            parameters=SnapParams,
        )
    ]
