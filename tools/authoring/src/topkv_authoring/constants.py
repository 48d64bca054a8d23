"""Launch constants that kernels of many selectors and stages have."""

from __future__ import annotations

from typing import Any

import torch

from topkv.hooks.algorithm import AlgorithmSetup
from topkv.hooks.stage import StageSetup


def constants(
    kernel: Any, setup: AlgorithmSetup | StageSetup, queries: int = 1, **own: Any
) -> dict[str, Any]:
    """Keywords of a kernel's launches: ``own``, and constants that its arguments name.

    Of the group KV_HEADS, LANE_HEADS, HEADS_PER_LANE, UNIT, UNITS_PER_PAGE, PAGE (its tokens) and
    D; of the model GROUP, query heads of a kv-head, those of all QUERIES of a row. BLOCK_D and
    BLOCK_G are the powers of two that hold D and GROUP, 16 or more, as a product wants. FP32 says
    that products are made in fp32: for fp32 models, and for the interpreter, which has no bfloat16
    product.

    Args:
        kernel: a function of ``triton.jit``.
        setup: of the algorithm or the stage that launches it.
        queries: of a row.
        own: further constants, warps and the like; they come before those above.
    """
    import triton

    model, group = setup.model, setup.group
    known = {
        "KV_HEADS": group.num_kv_heads,
        "LANE_HEADS": group.lane_heads,
        "HEADS_PER_LANE": group.heads_per_lane,
        "UNIT": group.unit,
        "UNITS_PER_PAGE": group.units_per_page,
        "PAGE": group.page_tokens,
        "D": group.head_dim,
        "GROUP": model.group_size * queries,
        "QUERIES": queries,
        "BLOCK_D": max(16, triton.next_power_of_2(group.head_dim)),
        "BLOCK_G": max(16, triton.next_power_of_2(model.group_size * queries)),
        "FP32": model.dtype is torch.float32 or setup.device.type == "cpu",
    }
    return {name: known[name] for name in kernel.arg_names if name in known} | own
