"""Quest with its kernels: launches, and the scratch that they share."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from topkv import hookimpl
from topkv.hooks.algorithm import AlgorithmSetup
from topkv.ops.lane_scores import HeadScores
from topkv.types import LayerView
from topkv_quest import bound_kernels, kernels
from topkv_quest.algorithm import Quest

TILE_U, TILES, STAGES = 32, 4, 3
"""Units of a tile, tiles of one program of the score kernel, loads in flight. One warp a program
and three stages read bounds fastest: 88 % of what an H200 reads at best, 66 % for int8."""

BLOCK_U = TILE_U * TILES
"""Units whose maximum and exponential sum are kept together."""

NARROW_G, NARROW_D = 64, 256
"""Query heads of a kv-head, and channels, whose queries a program keeps in registers."""

WIDE = {"TILE_U": 64, "TILES": 2, "STAGES": 3, "BLOCK_D": 64, "num_warps": 8}
"""The same of the score kernel of larger ones, and channels that it takes at a time."""

_METADATA = {torch.bfloat16: 1, torch.int8: 2}


class QuestTriton(Quest):
    """Quest in kernels, with every constant worked out once."""

    impl = "triton"

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        model, group, device = self.model, self.group, setup.device
        self.heads = HeadScores(model, group, BLOCK_U, device)
        self.as_bits = model.dtype is torch.bfloat16
        self.metadata = _METADATA.get(self.metadata_dtype, 0)
        geometry = {
            "KV_HEADS": model.num_kv_heads,
            "UNIT": group.unit,
            "UNITS_PER_PAGE": group.units_per_page,
            "D": group.head_dim,
            "BLOCK_D": max(16, triton.next_power_of_2(group.head_dim)),
        }
        writing = {
            "METADATA": self.metadata,
            "BLOCK_T": max(2, triton.next_power_of_2(group.unit)),
            "num_warps": 4 if group.head_dim <= NARROW_D else 8,
        }
        self.writing = geometry | writing | {"KEY_BF16": self.as_bits}
        self.scoring = geometry | {
            "GROUP": model.group_size,
            "TILE_U": TILE_U,
            "TILES": TILES,
            "STAGES": STAGES,
            "BLOCK_G": max(16, triton.next_power_of_2(model.group_size)),
            "SCALED": self.metadata_dtype is torch.int8,
            "FP32": model.dtype is torch.float32 or device.type == "cpu",
            "num_warps": 1,
        }
        self.kernel, self.parts = kernels.score_kernel, 1
        if group.head_dim > NARROW_D or model.group_size > NARROW_G:
            self.kernel = kernels.wide_score_kernel
            self.scoring |= WIDE | {"BLOCK_G": min(NARROW_G, self.scoring["BLOCK_G"])}
            self.parts = triton.cdiv(model.group_size, self.scoring["BLOCK_G"])

    def _writable(self, layer: LayerView) -> tuple[Tensor, Tensor]:
        """Bounds and scale as the writing kernels take them; bfloat16 as its bits."""
        bounds = layer.pools["bounds"]
        if self.metadata == 1:
            bounds = bounds.view(torch.int16)
        scale = layer.pools["scale"].view(torch.int16) if self.metadata == 2 else bounds
        return bounds, scale

    @hookimpl
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        if k.shape[0] == 0:
            return
        group = self.group
        bounds, scale = self._writable(layer)
        if k.stride(-1) != 1:
            k = k.contiguous()
        keys = k.view(torch.int16) if self.as_bits else k
        units = triton.cdiv(k.shape[0], group.unit)
        bound_kernels.construct_kernel[(units, group.num_kv_heads)](
            *(keys, bounds, scale, layer.step.page_table[slot]),
            *(start // group.unit, k.shape[0], k.stride(0), k.stride(1)),
            **self.writing,
        )

    @hookimpl
    def update(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        group, step, ring = self.group, layer.step, layer.ring_k
        bounds, scale = self._writable(layer)
        keys = ring.view(torch.int16) if self.as_bits else ring
        bound_kernels.update_kernel[(step.batch, group.num_kv_heads)](
            *(keys, bounds, scale, step.slots, step.lengths, step.appended),
            *(step.page_table, step.page_table.stride(0), *ring.stride()[:5]),
            HEADS_PER_LANE=group.heads_per_lane,
            T=group.ring_slots,
            **self.writing,
        )

    def lane_scores(self, layer: LayerView, q: Tensor) -> tuple[Tensor, Tensor]:
        group, step = self.group, layer.step
        bounds = layer.pools["bounds"]
        scale = layer.pools.get("scale", bounds)
        tables = (step.slots, step.lengths)
        work = (self.heads.raw, self.heads.peak, self.heads.mass)
        programs = step.batch * group.num_kv_heads * self.parts
        self.kernel[(programs, self.heads.blocks)](
            *(q, bounds, scale, *tables, step.page_table, *work),
            *(step.page_table.stride(0), group.max_units, self.heads.blocks, self.model.scale),
            *(q.stride(0), q.stride(1)),
            **self.scoring,
        )
        return self.heads.lanes(step, self.sink_units)
