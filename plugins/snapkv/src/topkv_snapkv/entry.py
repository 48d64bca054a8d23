"""Entry of the plugin, through which topkv finds the algorithm ``snapkv``."""

from __future__ import annotations

import math
from typing import Any

from attrs import Attribute, field, frozen
from attrs.validators import ge, in_, lt

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


def _odd(_: object, __: Attribute[Any], value: int) -> None:
    if value % 2 == 0:
        raise ValueError("must be odd, so that it has a middle")


@frozen
class SnapParams:
    """Parameters.

    Attributes:
        window: W, the last prompt tokens: they vote, and are always kept.
        kernel: tokens over which votes are pooled.
        pool: how: by their ``"max"`` or their mean, ``"avg"``.
        generated: places for tokens behind the prompt.
        outgrow: ``"refuse"`` further ones, or let them ``"slide"``: the newest are attended.
        ada: heads share their budgets.
        ada_max: then the widest head has at most this many times the mean.
    """

    window: int = field(default=64, validator=ge(1))
    kernel: int = field(default=7, validator=[ge(1), _odd])
    pool: str = field(default="max", validator=in_(("max", "avg")))
    generated: int = field(default=256, validator=ge(1))
    outgrow: str = field(default="refuse", validator=in_(("refuse", "slide")))
    ada: bool = False
    ada_max: float = field(default=2.0, validator=[ge(1), lt(math.inf)])

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
                # Not nested: true of one budget for all heads, not of ada.
                traits=("scale_free", "head_equivariant", "value_free"),
            ),
            defaults={"unit": 1, "scope": "kv_head"},
            parameters=SnapParams,
        )
    ]
