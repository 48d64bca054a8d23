"""Entry of the plugin, through which topkv finds the stage ``skip_softmax``."""

from __future__ import annotations

import math

from attrs import field, frozen
from attrs.validators import gt, lt

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@frozen
class SkipParams:
    """Parameters.

    Attributes:
        factor: a block is left out whose weight is below ``factor / length`` of the largest.
    """

    factor: float = field(default=1.0, validator=[gt(0), lt(math.inf)])


@hookimpl
def topkv_register_stages() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="skip_softmax",
            kind="stage",
            factories="topkv_skip_softmax.stage:SkipSoftmax",
            hook_api=(3, 0),
            capabilities=Capabilities(options=("skip_softmax",), queries=8),
            parameters=SkipParams,
        )
    ]
