"""Entry of the plugin, through which topkv finds the algorithm ``deepseek_dsa``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


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
            hook_api=(2, 5),
            capabilities=Capabilities(
                units=(1, 1),
                scopes=("shared",),
                attention=("mla",),
                needs_index=True,
                tail="selectable",
                dtypes=("float16", "bfloat16", "float32"),
                # Not scale_free: fp8 codes of scaled queries round anew, and scales have a least
                # value. Not head_equivariant: there is one selection for all heads.
                traits=(
                    "attends",
                    "nested",
                    "exact_update",
                    "low_ties",
                    "incremental",
                    "value_free",
                ),
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
            parameters={"keys": "fp8", "hadamard": False, "scale_format": "fp32", "sticky": 0.0},
        )
    ]
