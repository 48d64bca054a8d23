"""Launches of the ParisKV kernels, and their scratch."""

from __future__ import annotations

from typing import ClassVar

import torch
import triton
from torch import Tensor

from topkv.hooks.algorithm import AlgorithmSetup
from topkv.types import LayerView
from topkv_authoring.lane_scores import HeadScores
from topkv_authoring.units import KeptOfTokens
from topkv_pariskv import code_kernels, kernels, reference
from topkv_pariskv.algorithm import ParisKV

TILE, TILES = 128, 8
"""Tokens of a tile, and tiles of one program of the score kernel."""

BLOCK_U = TILE * TILES
"""Tokens whose maximum and exponential sum are kept together."""

REGISTERS = {8: 128, 16: 168}
"""Registers of a thread of the score kernel, by BLOCK_G: as many as it takes without the branch of
the outliers, where few tiles come by; with it the compiler would take a fifth more for all."""


class ParisKVTriton(KeptOfTokens, ParisKV):
    """ParisKV in kernels, with every constant worked out once.

    Scratch: ``HeadScores``, and rotated queries, fp32 ``[max_requests * Hkv, BLOCK_G, P]``.
    """

    impl = "triton"
    represent_tokens = code_kernels.write_codes
    writing: ClassVar = {"num_warps": 4, "enable_fp_fusion": False}

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        model, group, device = self.model, self.group, setup.device
        wide = reference.width(group.head_dim)
        block_g = max(8, triton.next_power_of_2(model.group_size))
        pairs = group.max_requests * model.num_kv_heads
        self.rotated = torch.empty((pairs, block_g, wide), dtype=torch.float32, device=device)
        self.heads = HeadScores(model, group, BLOCK_U, device)
        geometry = {"KV_HEADS": model.num_kv_heads, "D": group.head_dim, "WIDE": wide}
        self.rotating = geometry | {
            "LOG_WIDE": wide.bit_length() - 1,
            "num_warps": 4,
            "enable_fp_fusion": False,
        }
        self.asking = self.rotating | {"GROUP": model.group_size, "BLOCK_G": block_g}
        self.scoring = geometry | {
            "PAIRS": self.params.outliers,
            "GROUP": model.group_size,
            "PAGE": group.page_tokens,
            "TILE": TILE,
            "TILES": TILES,
            "BYTES": max(16, wide // 8),
            "BLOCK_G": block_g,
            "FP32": model.dtype is torch.float32 or device.type == "cpu",
            "num_warps": 2,
        }
        if not self.scoring["FP32"] and block_g in REGISTERS:
            self.scoring["maxnreg"] = REGISTERS[block_g]

    @property
    def options(self) -> tuple[int, ...]:
        wide = reference.width(self.group.head_dim)
        return self.params.outliers, wide, wide.bit_length() - 1

    def written(self, layer: LayerView) -> tuple[Tensor, ...]:
        pools = layer.pools
        factor = pools["factor"].view(torch.int16)
        return pools["codes"], factor, pools["outliers"], self.signs

    def lane_scores(self, layer: LayerView, q: Tensor) -> tuple[Tensor, Tensor]:
        group, step, pools = self.group, layer.step, layer.pools
        pairs = step.batch * group.num_kv_heads
        work = (self.heads.raw, self.heads.peak, self.heads.mass)
        code_kernels.query_kernel[(pairs,)](
            *(q, self.signs, step.slots, self.rotated, q.stride(0), q.stride(1)), **self.asking
        )
        kernels.score_kernel[(pairs, self.heads.blocks)](
            *(q, self.rotated, pools["codes"].view(torch.uint8), pools["factor"]),
            *(pools["outliers"], step.slots, step.lengths, step.page_table, *work),
            *(step.page_table.stride(0), group.max_units, self.heads.blocks, self.model.scale),
            *(q.stride(0), q.stride(1)),
            **self.scoring,
        )
        return self.heads.lanes(step, self.sink_units, self.recent_units)
