"""Tensor parallel ranks: each has some of the heads, a coordinator and a host pool for them.

Blocks are the scheduler's, so pages are the same on all ranks, and so is what each does in a step
(``topkv_vllm.requests``). vLLM takes the least number of blocks that a rank has room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from topkv.config import LoweredConfig
from topkv.hooks.algorithm import AlgorithmSpec


def rank_reasons(
    vllm_config: Any, lowered: LoweredConfig, specs: Sequence[AlgorithmSpec | None]
) -> list[str]:
    """Why algorithms cannot select where each rank has some of the heads alone.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        lowered: of one rank.
        specs: of its groups; None for dense ones.
    """
    ranks, heads = vllm_config.parallel_config.tensor_parallel_size, kv_heads(vllm_config)
    reasons = {}
    for group, spec in zip(lowered.groups, specs, strict=True):
        shared = group.scope == "shared" and heads > 1
        if ranks == 1 or spec is None or spec.heads == "none":
            continue
        if spec.heads == "all" or shared:
            why = "all heads of a layer share a selection"
            hint = "set scope to 'kv_head'"
            if spec.heads == "all":
                why, hint = "a selection goes by all heads of a layer", "set other parameters"
            reasons[
                f"tensor parallel ranks: with {group.algorithm} {why}, and each of {ranks} ranks "
                f"has some of the {heads} kv-heads alone; {hint}, or tensor_parallel_size to 1"
            ] = None
    return [*reasons]


def split_reasons(vllm_config: Any) -> list[str]:
    """What the reasons of a rank are to be read with; nothing where there is one rank."""
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if ranks == 1:
        return []
    heads = vllm_config.model_config.get_num_kv_heads(vllm_config.parallel_config)
    return [
        f"this is told of one of {ranks} tensor parallel ranks, which has {heads} of the "
        f"{kv_heads(vllm_config)} kv-heads of the model; what is by kv-head, such as a file of a "
        "calibration, must be so too"
    ]


def kv_heads(vllm_config: Any) -> int:
    """Of the whole model."""
    heads: int = vllm_config.model_config.get_total_num_kv_heads()
    return heads
