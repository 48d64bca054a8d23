"""Entry of the plugin, through which topkv finds the algorithm ``deepseek_dsa``."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import in_

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry
from topkv_authoring.parameters import BONUS, FLOATS, RANKED


@frozen
class IndexerParams:
    """Parameters.

    Attributes:
        keys: index keys and queries are ``"fp8"`` (e4m3 with fp32 scales), or ``"bf16"``, of the
            model's dtype.
        hadamard: both go through a Hadamard transform first.
        scale_format: scales are any ``"fp32"``, or ``"ue8m0"``, powers of two.
        sticky: bonus of tokens that are on the device, in the units of index scores.
    """

    keys: str = field(default="fp8", validator=in_(("bf16", "fp8")))
    hadamard: bool = False
    scale_format: str = field(default="fp32", validator=in_(("fp32", "ue8m0")))
    sticky: float = field(default=0.0, validator=BONUS)

    @property
    def fp8(self) -> bool:
        return self.keys == "fp8"

    @property
    def power_of_two(self) -> bool:
        return self.scale_format == "ue8m0"


@hookimpl
def topkv_register_algorithms() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="deepseek_dsa",
            kind="algorithm",
            factories={
                "reference": "topkv_deepseek_dsa.algorithm:DeepSeekDSA",
                "triton": "topkv_deepseek_dsa.launch:DeepSeekDSATriton",
            },
            hook_api=(3, 0),
            capabilities=Capabilities(
                units=(1, 1),
                scopes=("shared",),
                attention=("mla",),
                needs_index=True,
                queries=8,
                tail="selectable",
                dtypes=FLOATS,
                # Not scale_free: fp8 codes of scaled queries round anew, and scales have a least
                # value. Not head_equivariant: there is one selection for all heads.
                traits=("attends", "exact_update", *RANKED),
            ),
            defaults={
                "unit": 1,
                "scope": "shared",
                "dense_layers": (),
                "budget": 2048,
                "page_tokens": 64,
                # Rows of scores are tokens; topkv-triton-topk is made for rows so long.
                "topk": "pivot",
            },
            parameters=IndexerParams,
        )
    ]
