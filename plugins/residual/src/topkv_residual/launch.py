"""The same with kernels: launches, and the scratch that they share."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from topkv import hookimpl
from topkv.hooks.stage import StageSetup
from topkv.types import LayerView
from topkv_residual import kernels, unit_kernels
from topkv_residual.stage import Residual

TILE_U, TILES, STAGES = 32, 4, 2
"""Units of a tile, tiles of one program, loads in flight."""

BLOCK_K = 64
"""Ids that a tile is compared with at a time."""


class ResidualTriton(Residual):
    """The estimate in kernels, with every constant worked out once.

    Scratch: of each query head and share of ``TILE_U * TILES`` units D + 2 numbers in fp32.
    """

    def __init__(self, setup: StageSetup) -> None:
        super().__init__(setup)
        model, group, device = self.model, self.group, setup.device
        self.shares = triton.cdiv(group.max_units, TILE_U * TILES)
        pairs = group.max_requests * model.num_heads * self.shares

        def scratch(each: int) -> Tensor:
            return torch.empty(pairs * each, dtype=torch.float32, device=device)

        self.peak, self.mass, self.sum = scratch(1), scratch(1), scratch(model.head_dim)
        block_d = max(16, triton.next_power_of_2(model.head_dim))
        geometry = {
            "KV_HEADS": model.num_kv_heads,
            "UNIT": group.unit,
            "UNITS_PER_PAGE": group.units_per_page,
            "VARIANCE": self.variance,
            "D": model.head_dim,
            "BLOCK_D": block_d,
        }
        self.writing = geometry | {"BLOCK_T": max(2, triton.next_power_of_2(group.unit))}
        self.weighing = geometry | {
            "HEADS_PER_LANE": group.heads_per_lane,
            "GROUP": model.group_size,
            "TILE_U": TILE_U,
            "TILES": TILES,
            "STAGES": STAGES,
            "BLOCK_G": max(16, triton.next_power_of_2(model.group_size)),
            "BLOCK_K": BLOCK_K,
            "FP32": model.dtype is torch.float32 or device.type == "cpu",
            "num_warps": 4,
        }
        self.adding = {
            "HEADS": model.num_heads,
            "UNIT": group.unit,
            "SHARE_UNITS": TILE_U * TILES,
            "D": model.head_dim,
            "BLOCK_D": block_d,
            "num_warps": 1,
        }

    def _pools(self, layer: LayerView) -> tuple[Tensor, Tensor]:
        means = layer.pools["means"]
        return means, layer.pools.get("deviation", means)

    @hookimpl
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        if k.shape[0] == 0:
            return
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        units = triton.cdiv(k.shape[0], self.group.unit)
        unit_kernels.construct_kernel[(units, self.group.num_kv_heads)](
            *(k, v, *self._pools(layer), layer.step.page_table[slot]),
            *(start // self.group.unit, k.shape[0]),
            *(k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
            **self.writing,
        )

    @hookimpl
    def update(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        group, step = self.group, layer.step
        unit_kernels.update_kernel[(step.batch, group.num_kv_heads)](
            *(layer.ring_k, layer.ring_v, *self._pools(layer)),
            *(step.slots, step.lengths, step.appended, step.page_table),
            *(step.page_table.stride(0), *layer.ring_k.stride()[:5]),
            HEADS_PER_LANE=group.heads_per_lane,
            T=group.ring_slots,
            **self.writing,
        )

    @hookimpl
    def correct(self, layer: LayerView, q: Tensor, ids: Tensor, out: Tensor, lse: Tensor) -> None:
        model, group, step = self.model, self.group, layer.step
        work = (self.peak, self.mass, self.sum)
        kernels.weigh_kernel[(step.batch * model.num_kv_heads, self.shares)](
            *(q, *self._pools(layer), ids, step.slots, step.lengths, step.page_table, *work),
            *(step.page_table.stride(0), self.shares, ids.shape[1]),
            *(model.scale, math.log(group.unit), q.stride(0), q.stride(2), ids.stride(0)),
            **self.weighing,
        )
        kernels.add_kernel[(step.batch * model.num_heads,)](
            *(step.slots, step.lengths, *work, out, lse),
            *(self.shares, out.stride(0), out.stride(2)),
            **self.adding,
        )
