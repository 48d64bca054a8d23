"""The same with kernels: launches, and the scratch that they share."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from topkv import hookimpl
from topkv.hooks.algorithm import AlgorithmSetup
from topkv.types import LayerView
from topkv_pariskv import code_kernels, kernels, reference
from topkv_pariskv.algorithm import ParisKV

TILE, TILES, STAGES = 128, 8, 3
"""Tokens of a tile, tiles of one program of the score kernel, loads in flight."""

BLOCK_U = TILE * TILES
"""Tokens whose maximum and exponential sum are kept together."""

TILE_V = 2048
"""Scores, of all heads together, of one program of the combining kernel."""

BLOCK_T = 16
"""Tokens of one program of the kernel that encodes a prompt."""


class ParisKVTriton(ParisKV):
    """ParisKV in kernels, with every constant worked out once.

    Scratch, fp32: rotated queries ``[max_requests * Hkv, BLOCK_G, P]``, scaled scores
    ``[max_requests * H, U]``, maximum and exponential sum of each block of tokens
    ``[max_requests * H, blocks]``, and scores ``[rows, U]``.
    """

    impl = "triton"

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        model, group, device = self.model, self.group, setup.device
        wide = reference.width(group.head_dim)
        self.blocks = triton.cdiv(max(group.max_units, 1), BLOCK_U)
        block_g = max(16, triton.next_power_of_2(model.group_size))
        floats = {"dtype": torch.float32, "device": device}
        heads = group.max_requests * model.num_heads
        pairs = group.max_requests * model.num_kv_heads
        self.rotated = torch.empty((pairs, block_g, wide), **floats)
        self.raw = torch.empty((heads, group.max_units), **floats)
        self.peak = torch.empty((heads, self.blocks), **floats)
        self.mass = torch.empty((heads, self.blocks), **floats)
        self.scores = torch.empty((group.max_lanes, group.max_units), **floats)
        self.closed = torch.zeros(group.max_lanes, dtype=torch.int32, device=device)
        geometry = {"KV_HEADS": model.num_kv_heads, "WIDE": wide}
        self.rotating = geometry | {
            "D": group.head_dim,
            "LOG_WIDE": wide.bit_length() - 1,
            "num_warps": 4,
            "enable_fp_fusion": False,
        }
        self.asking = self.rotating | {"GROUP": model.group_size, "BLOCK_G": block_g}
        self.scoring = geometry | {
            "GROUP": model.group_size,
            "PAGE": group.page_tokens,
            "TILE": TILE,
            "TILES": TILES,
            "STAGES": STAGES,
            "BLOCK_G": block_g,
            "FP32": model.dtype is torch.float32 or device.type == "cpu",
            "num_warps": 4,
        }
        heads = model.num_heads // group.lane_heads
        block_h = triton.next_power_of_2(heads)
        units = triton.next_power_of_2(max(group.max_units, 16))
        self.combining = {
            "LANE_HEADS": group.lane_heads,
            "HEADS": heads,
            "BLOCK_U": BLOCK_U,
            "BLOCK_H": block_h,
            "BLOCK_P": min(64, triton.next_power_of_2(self.blocks)),
            "BLOCK_V": max(16, min(TILE_V // block_h, units)),
            "num_warps": 4,
        }

    @hookimpl
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        if k.shape[0] == 0:
            return
        group, pools = self.group, layer.pools
        code_kernels.construct_kernel[(triton.cdiv(k.shape[0], BLOCK_T), group.num_kv_heads)](
            *(k, self.signs, pools["codes"], pools["factor"].view(torch.int16)),
            *(layer.step.page_table[slot], start, k.shape[0], k.stride(0), k.stride(1)),
            PAGE=group.page_tokens,
            BLOCK_T=BLOCK_T,
            **self.rotating,
        )

    @hookimpl
    def update(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        group, step, pools = self.group, layer.step, layer.pools
        code_kernels.update_kernel[(step.batch,)](
            *(k, self.signs, pools["codes"], pools["factor"].view(torch.int16)),
            *(step.slots, step.lengths, step.appended, step.page_table),
            *(step.page_table.stride(0), k.stride(0), k.stride(1)),
            PAGE=group.page_tokens,
            BLOCK_H=triton.next_power_of_2(group.num_kv_heads),
            **self.rotating,
        )

    def lane_scores(self, layer: LayerView, q: Tensor) -> tuple[Tensor, Tensor]:
        group, step, pools = self.group, layer.step, layer.pools
        pairs = step.batch * group.num_kv_heads
        work = (self.raw, self.peak, self.mass)
        code_kernels.query_kernel[(pairs,)](
            *(q, self.signs, step.slots, self.rotated, q.stride(0), q.stride(1)), **self.asking
        )
        kernels.score_kernel[(pairs, self.blocks)](
            *(self.rotated, pools["codes"], pools["factor"]),
            *(step.slots, step.lengths, step.page_table, *work),
            *(step.page_table.stride(0), group.max_units, self.blocks, self.model.scale),
            **self.scoring,
        )
        lanes = step.batch * group.lane_heads
        grid = (lanes, triton.cdiv(group.max_units, self.combining["BLOCK_V"]))
        kernels.combine_kernel[grid](
            *(*work, step.slots, step.lengths, self.scores, self.closed),
            *(group.max_units, self.blocks, self.sink_units, self.recent_units),
            **self.combining,
        )
        return self.scores[:lanes], self.closed[:lanes]
