"""Quest with its kernels: launches, and the scratch that they share."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from topkv import hookimpl
from topkv.hooks.algorithm import AlgorithmSetup
from topkv.types import LayerView
from topkv_quest import bound_kernels, kernels
from topkv_quest.algorithm import Quest

TILE_U, TILES, STAGES = 32, 4, 3
"""Units of a tile, tiles of one program of the score kernel, loads in flight. One warp a program
and three stages read bounds fastest: 88 % of what an H200 reads at best, 66 % for int8."""

BLOCK_U = TILE_U * TILES
"""Units whose maximum and exponential sum are kept together."""

TILE_V = 2048
"""Scores, of all heads together, of one program of the combining kernel. Half as many programs of
twice as many scores took 1 to 2 us more in each of five cells from 1 x 32K to 16 x 128K."""

_METADATA = {torch.bfloat16: 1, torch.int8: 2}


class QuestTriton(Quest):
    """Quest in kernels, with every constant worked out once.

    Scratch, fp32: scaled scores ``[max_requests * H, U]``, maximum and exponential sum of
    each block of units ``[max_requests * H, blocks]``, and scores ``[rows, U]``.
    """

    impl = "triton"

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        model, group, device = self.model, self.group, setup.device
        self.blocks = triton.cdiv(max(group.max_units, 1), BLOCK_U)
        floats = {"dtype": torch.float32, "device": device}
        heads = group.max_requests * model.num_heads
        self.raw = torch.empty((heads, group.max_units), **floats)
        self.peak = torch.empty((heads, self.blocks), **floats)
        self.mass = torch.empty((heads, self.blocks), **floats)
        self.scores = torch.empty((group.max_lanes, group.max_units), **floats)
        self.closed = torch.zeros(group.max_lanes, dtype=torch.int32, device=device)
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
            "num_warps": 4,
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
        heads = model.num_heads // group.lane_heads
        block_h = triton.next_power_of_2(heads)
        units = triton.next_power_of_2(max(group.max_units, 16))
        self.combining = {
            "LANE_HEADS": group.lane_heads,
            "HEADS": heads,
            "UNIT": group.unit,
            "BLOCK_U": BLOCK_U,
            "BLOCK_H": block_h,
            "BLOCK_P": min(64, triton.next_power_of_2(self.blocks)),
            "BLOCK_V": max(16, min(TILE_V // block_h, units)),
            "num_warps": 4,
        }

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
        work = (self.raw, self.peak, self.mass)
        kernels.score_kernel[(step.batch * group.num_kv_heads, self.blocks)](
            *(q, bounds, scale, *tables, step.page_table, *work),
            *(step.page_table.stride(0), group.max_units, self.blocks, self.model.scale),
            *(q.stride(0), q.stride(1)),
            **self.scoring,
        )
        lanes = step.batch * group.lane_heads
        grid = (lanes, triton.cdiv(group.max_units, self.combining["BLOCK_V"]))
        kernels.combine_kernel[grid](
            *(*work, *tables, self.scores, self.closed),
            *(group.max_units, self.blocks, self.sink_units),
            **self.combining,
        )
        return self.scores[:lanes], self.closed[:lanes]
