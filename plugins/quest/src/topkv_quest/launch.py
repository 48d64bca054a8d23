"""Launches of the Quest kernels and the workspaces that they share."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from topkv.ops.topk import workspace
from topkv.types import GroupShape, LayerView, ModelShape
from topkv_quest import bound_kernels, kernels

TILE_U, TILES, STAGES = 32, 4, 3
"""Units of a tile, tiles of one program of the score kernel, loads in flight. One warp a program
and three stages read bounds fastest: 88 % of what an H200 reads at best, 66 % for int8."""

BLOCK_U = TILE_U * TILES
"""Units whose maximum and exponential sum are kept together."""

TILE_V = 4096
"""Scores, of all heads together, of one program of the combining kernel."""

_METADATA = {torch.bfloat16: 1, torch.int8: 2}


class Launcher:
    """The kernels of one group, with every constant worked out once.

    Workspaces, fp32: scaled scores ``[max_requests * H, U]``, maximum and exponential sum of
    each block of units ``[max_requests * H, blocks]``, and scores ``[rows, U]``.
    """

    def __init__(
        self, model: ModelShape, group: GroupShape, metadata: torch.dtype, device: torch.device
    ) -> None:
        self.model, self.group = model, group
        self.blocks = triton.cdiv(max(group.max_units, 1), BLOCK_U)
        floats = {"dtype": torch.float32, "device": device}
        heads = group.max_requests * model.num_heads
        self.raw = torch.empty((heads, group.max_units), **floats)
        self.peak = torch.empty((heads, self.blocks), **floats)
        self.mass = torch.empty((heads, self.blocks), **floats)
        self.scores = torch.empty((group.rows, group.max_units), **floats)
        self.closed = torch.zeros(group.rows, dtype=torch.int32, device=device)
        self.work = workspace(group.rows, group.max_units, group.select, device)
        self.as_bits = model.dtype is torch.bfloat16
        self.fp32 = model.dtype is torch.float32 or device.type == "cpu"
        self.metadata = _METADATA.get(metadata, 0)
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
            "SCALED": metadata is torch.int8,
            "FP32": self.fp32,
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

    def construct(self, layer: LayerView, slot: int, start: int, k: Tensor) -> None:
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

    def update(self, layer: LayerView) -> None:
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

    def score(self, layer: LayerView, q: Tensor, sink_units: int) -> tuple[Tensor, Tensor]:
        """Scores ``[N, U]`` and closed units ``[N]`` of the lanes of queries ``[B, H, D]``."""
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
            *(group.max_units, self.blocks, sink_units),
            **self.combining,
        )
        return self.scores[:lanes], self.closed[:lanes]
