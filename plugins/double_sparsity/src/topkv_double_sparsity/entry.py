"""Entry of the plugin, through which topkv finds the algorithm ``double_sparsity``."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, in_, min_len, optional

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry
from topkv_authoring.parameters import BONUS, FLOATS, RANKED


@frozen
class LabelParams:
    """Parameters.

    Attributes:
        channels: r, channels of a label; None for half of them.
        label: of ``"int4"``, 4 bit with a scale and a zero, or ``"bf16"``, the keys' own dtype.
        calibration: path of the file that says which channels; None to choose from each prompt.
        sink_tokens: first tokens, which every selection holds.
        sticky: bonus of tokens that are on the device, in natural logarithms.
    """

    channels: int | None = field(default=None, validator=optional(ge(1)))
    label: str = field(default="int4", validator=in_(("bf16", "int4")))
    calibration: str | None = field(default=None, validator=optional(min_len(1)))
    sink_tokens: int = field(default=0, validator=ge(0))
    sticky: float = field(default=0.0, validator=BONUS)


@hookimpl
def topkv_register_algorithms() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="double_sparsity",
            kind="algorithm",
            factories={
                "reference": "topkv_double_sparsity.algorithm:DoubleSparsity",
                "triton": "topkv_double_sparsity.launch:DoubleSparsityTriton",
            },
            hook_api=(3, 0),
            capabilities=Capabilities(
                units=(1, 1),
                scopes=("kv_head", "shared"),
                dtypes=FLOATS,
                attention=("gqa", "mla"),
                queries=8,
                # Promised for the default parameters. Not scale_free: a mean of softmaxes. Not
                # exact_update: without a calibration file the first chunk chooses the channels.
                traits=("attends", "head_equivariant", *RANKED),
            ),
            # Rows of scores are tokens; topkv-triton-topk is made for rows so long.
            defaults={"unit": 1, "scope": "kv_head", "dense_layers": (0, 1), "topk": "pivot"},
            parameters=LabelParams,
        )
    ]
