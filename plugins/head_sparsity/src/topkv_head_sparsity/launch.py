"""Launches of the head sparsity kernels, and their scratch."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from topkv import hookimpl
from topkv.hooks.stage import StageSetup
from topkv.types import LayerView, Selection
from topkv_head_sparsity import kernels, reference, run_kernels
from topkv_head_sparsity.stage import HeadSparsity

RUNS = 64
"""Runs of a program of the kernel that weighs units."""

OWN, BLOCK = 32, 128
"""Ids of a program of the kernel that drops, and places that it reads at a time."""


class HeadSparsityTriton(HeadSparsity):
    """Head sparsity in kernels, with every constant worked out once.

    Scratch: worth of candidates and sample, fp32 ``[max_requests, H, K' + SAMPLE]``.
    """

    def __init__(self, setup: StageSetup) -> None:
        super().__init__(setup)
        model, group, device = self.model, self.group, setup.device
        places = min(group.select, group.max_units) + reference.SAMPLE
        shape = (group.max_requests * model.num_heads * places,)
        self.scratch = torch.empty(shape, dtype=torch.float32, device=device)
        half, runs = (model.head_dim + 1) // 2, triton.cdiv(group.unit, reference.RUN)
        block_r = triton.next_power_of_2(runs)
        geometry = {
            "KV_HEADS": model.num_kv_heads,
            "UNIT": group.unit,
            "UNITS_PER_PAGE": group.units_per_page,
            "RUNS": runs,
            "D": model.head_dim,
            "WIDTH": half,
            "BLOCK_R": block_r,
            "BLOCK_W": max(16, triton.next_power_of_2(half)),
            "num_warps": 4,
        }
        self.writing = geometry | {"enable_fp_fusion": False}
        self.weighing = geometry | {
            "HEADS_PER_LANE": group.heads_per_lane,
            "GROUP": model.group_size,
            "BLOCK_P": max(1, RUNS // block_r),
            "BLOCK_G": max(16, triton.next_power_of_2(model.group_size)),
            "BLOCK": BLOCK,
            "FP32": model.dtype is torch.float32 or device.type == "cpu",
        }
        heads = model.num_heads // group.lane_heads
        self.dropping = {
            "LANES": group.lane_heads,
            "HEADS": heads,
            "UNIT": group.unit,
            "OWN": OWN,
            "BLOCK": BLOCK,
            "BLOCK_G": triton.next_power_of_2(heads),
            "num_warps": 4,
        }

    @hookimpl
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        if k.shape[0] == 0:
            return
        pools, units = layer.pools, triton.cdiv(k.shape[0], self.group.unit)
        run_kernels.construct_kernel[(units, self.model.num_kv_heads)](
            *(k, pools["codes"], pools["scale"], layer.step.page_table[slot]),
            *(start // self.group.unit, k.shape[0], k.stride(0), k.stride(1)),
            **self.writing,
        )

    @hookimpl
    def update(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        k = k[:, 0]
        group, pools, step = self.group, layer.pools, layer.step
        ring = k if group.unit == 1 else layer.ring_k
        strides = (0, 0, 0, 0, 0) if group.unit == 1 else ring.stride()[:5]
        run_kernels.update_kernel[(step.batch, self.model.num_kv_heads)](
            *(k, ring, pools["codes"], pools["scale"]),
            *(step.slots, step.lengths, step.appended, step.page_table),
            *(step.page_table.stride(0), k.stride(0), k.stride(1), *strides),
            HEADS_PER_LANE=group.heads_per_lane,
            T=group.ring_slots,
            **self.writing,
        )

    @hookimpl
    def refine(
        self, layer: LayerView, q: Tensor, candidates: Selection, out: Selection
    ) -> Selection:
        model, pools, step = self.model, layer.pools, layer.step
        (lanes, offered), places = candidates.ids.shape, candidates.ids.shape[1] + reference.SAMPLE
        blocks = triton.cdiv(places, self.weighing["BLOCK_P"])
        kernels.worth_kernel[(step.batch * model.num_kv_heads, blocks)](
            *(q, pools["codes"], pools["scale"], candidates.ids),
            *(step.slots, step.lengths, step.page_table, self.scratch),
            *(offered, step.page_table.stride(0), model.scale),
            *(q.stride(0), q.stride(2), candidates.ids.stride(0)),
            **self.weighing,
        )
        kernels.drop_kernel[(lanes, triton.cdiv(out.ids.shape[1], OWN))](
            *(self.scratch, candidates.ids, out.ids, step.slots, step.lengths),
            *(offered, out.ids.shape[1], self.few, self.threshold),
            *(candidates.ids.stride(0), out.ids.stride(0)),
            **self.dropping,
        )
        return out
