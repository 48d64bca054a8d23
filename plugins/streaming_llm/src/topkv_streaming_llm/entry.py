"""Entry of the plugin, through which topkv finds the algorithm ``streaming_llm``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@hookimpl
def topkv_register_algorithms() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="streaming_llm",
            kind="algorithm",
            factories={
                "reference": "topkv_streaming_llm.algorithm:StreamingLLM",
                "triton": "topkv_streaming_llm.launch:StreamingLLMTriton",
            },
            hook_api=(2, 0),
            capabilities=Capabilities(
                units=(1, 128),
                scopes=("shared", "kv_head"),
                # No scores, so no low_ties; no representation, so exact_update holds of nothing.
                traits=("nested", "scale_free", "head_equivariant", "value_free"),
            ),
            defaults={"unit": 16, "scope": "shared"},
            parameters={"sink_tokens": 4},
        )
    ]
