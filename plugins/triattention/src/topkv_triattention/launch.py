"""The same with kernels: launches, with every constant worked out once. Pages are scored by torch,
outside of steps."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from topkv import hookimpl
from topkv.hooks.stage import StageSetup
from topkv.types import LayerView
from topkv_triattention import kernels
from topkv_triattention.stage import TriAttention


class TriAttentionTriton(TriAttention):
    """Means are kept by kernels."""

    def __init__(self, setup: StageSetup) -> None:
        super().__init__(setup)
        model, group = self.model, self.group
        self.writing = {
            "KV_HEADS": model.num_kv_heads,
            "UNIT": group.unit,
            "UNITS_PER_PAGE": group.units_per_page,
            "PAIRS": model.head_dim // 2,
            "LARGEST": torch.finfo(model.dtype).max,
            "BLOCK_T": max(2, triton.next_power_of_2(group.unit)),
            "BLOCK_F": max(16, triton.next_power_of_2(model.head_dim // 2)),
        }

    @hookimpl
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        if k.shape[0] == 0:
            return
        k = k if k.stride(-1) == 1 else k.contiguous()
        units = triton.cdiv(k.shape[0], self.group.unit)
        kernels.construct_kernel[(units, self.group.num_kv_heads)](
            *(k, self.expected[layer.layer].pairs, layer.pools["means"]),
            *(layer.step.page_table[slot], start // self.group.unit, k.shape[0]),
            *(k.stride(0), k.stride(1)),
            **self.writing,
        )

    @hookimpl
    def update(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        group, step = self.group, layer.step
        keys, strides = layer.ring_k, layer.ring_k.stride()[:5]
        if group.unit == 1:  # where selections are regranulated there is no ring
            keys, strides = k, (k.stride(0), 0, 0, k.stride(1), 0)
        kernels.update_kernel[(step.batch, group.num_kv_heads)](
            *(keys, self.expected[layer.layer].pairs, layer.pools["means"], step.slots),
            *(step.lengths, step.appended, step.page_table, step.page_table.stride(0)),
            *strides,
            HEADS_PER_LANE=group.heads_per_lane,
            T=group.ring_slots,
            **self.writing,
        )
