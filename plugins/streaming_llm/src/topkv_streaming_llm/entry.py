"""Entry of the plugin, through which topkv finds the algorithm ``streaming_llm``."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@frozen
class StreamingParams:
    """Parameters.

    Attributes:
        sink_tokens: first tokens, whose units every selection holds.
    """

    sink_tokens: int = field(default=4, validator=ge(0))


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
            hook_api=(3, 0),
            capabilities=Capabilities(
                units=(1, 128),
                scopes=("shared", "kv_head"),
                queries=None,
                # No scores, so no low_ties; no representation, so exact_update holds of nothing.
                traits=("nested", "scale_free", "head_equivariant", "value_free"),
            ),
            defaults={"unit": 16, "scope": "shared"},
            parameters=StreamingParams,
        )
    ]
