"""The one launch of this plugin."""

from __future__ import annotations

import triton
from torch import Tensor

from topkv.types import LayerView
from topkv_streaming_llm.kernels import BLOCK, window_kernel


def write_kept_units(layer: LayerView, ids: Tensor, sinks: int) -> None:
    """``reference.kept_units`` of every lane to int32 ``ids [N, K]``; -1 in padded rows."""
    group, step = layer.group, layer.step
    lanes, select = step.batch * group.lane_heads, ids.shape[1]
    if lanes == 0 or select == 0:
        return
    block = min(BLOCK, triton.next_power_of_2(max(select, 16)))
    window_kernel[(lanes, triton.cdiv(select, block))](
        *(step.slots, step.lengths, ids, ids.stride(0), select, sinks),
        LANE_HEADS=group.lane_heads,
        UNIT=group.unit,
        BLOCK=block,
        num_warps=1 if block <= 256 else 4,
    )
