"""Entry of the plugin, through which topkv finds the algorithm ``rocketkv``."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, optional

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry
from topkv_authoring.parameters import BONUS, FLOATS, odd


@frozen
class RocketParams:
    """Parameters.

    Attributes:
        window: W, the last prompt tokens: they vote, and are always kept.
        kernel: places over which votes are pooled.
        generated: tokens behind a prompt that the default of ``prompt_budget`` leaves room for.
        prompt_budget: prompt tokens that a lane keeps; follows from the compression by default.
        channels: channels of a key that a step reads; follows from the compression by default.
        sticky: bonus of units that are on the device, in natural logarithms.
    """

    window: int = field(default=32, validator=ge(1))
    kernel: int = field(default=63, validator=[ge(1), odd])
    generated: int = field(default=256, validator=ge(0))
    prompt_budget: int | None = None
    channels: int | None = field(default=None, validator=optional(ge(1)))
    sticky: float = field(default=0.0, validator=BONUS)


@hookimpl
def topkv_register_algorithms() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="rocketkv",
            kind="algorithm",
            factories={
                "reference": "topkv_rocketkv.algorithm:RocketKV",
                "triton": "topkv_rocketkv.launch:RocketKVTriton",
            },
            hook_api=(3, 0),
            capabilities=Capabilities(
                units=(1, 128),
                scopes=("kv_head", "shared"),
                dtypes=FLOATS,
                max_group=64,
                queries=8,
                # Neither attends nor low_ties: a prompt's votes may drop the unit that would win.
                traits=("exact_update", "head_equivariant", "value_free"),
            ),
            defaults={"unit": 4, "scope": "kv_head"},
            parameters=RocketParams,
        )
    ]
