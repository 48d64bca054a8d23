"""StreamingLLM with its kernel, and the one launch of it."""

from __future__ import annotations

import triton
from torch import Tensor

from topkv import hookimpl
from topkv.types import LayerView, Selection
from topkv_streaming_llm.algorithm import StreamingLLM
from topkv_streaming_llm.kernels import BLOCK, window_kernel


class StreamingLLMTriton(StreamingLLM):
    """StreamingLLM whose ids a kernel writes."""

    @hookimpl
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, weights: Tensor | None, out: Selection
    ) -> Selection:
        group, step = layer.group, layer.step
        lanes, select = step.batch * group.lane_heads, out.ids.shape[1]
        if lanes == 0 or select == 0:
            return out
        block = min(BLOCK, triton.next_power_of_2(max(select, 16)))
        window_kernel[(lanes, triton.cdiv(select, block))](
            p_slots=step.slots,
            p_lengths=step.lengths,
            p_appended=step.appended,
            p_ids=out.ids,
            s_ids=out.ids.stride(0),
            select=select,
            sinks=self.sinks,
            LANE_HEADS=group.lane_heads,
            UNIT=group.unit,
            QUERIES=q.shape[1],
            BLOCK=block,
            num_warps=1 if block <= 256 else 4,
        )
        return out
