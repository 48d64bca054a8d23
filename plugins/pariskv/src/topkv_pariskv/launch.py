"""Launches of the ParisKV kernels, and their scratch."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import triton
from torch import Tensor

from topkv.hooks.algorithm import AlgorithmSetup
from topkv.types import LayerView
from topkv_authoring.constants import constants
from topkv_authoring.lane_scores import HeadScores
from topkv_authoring.units import KeptOfTokens
from topkv_pariskv import code_kernels, kernels, reference
from topkv_pariskv.algorithm import ParisKV

TILE, TILES = 128, 8
"""Tokens of a tile, and tiles of one program of the score kernel."""

BLOCK_U = TILE * TILES
"""Tokens whose maximum and exponential sum are kept together."""

REGISTERS = {8: 128, 16: 168}
"""Registers of a thread of the score kernel, by BLOCK_G, which several queries leave among these:
as many as it takes without the branch of outliers, with which a compiler takes a fifth more."""


class ParisKVTriton(KeptOfTokens, ParisKV):
    """ParisKV in kernels, with every constant worked out once.

    Scratch: ``HeadScores``, and rotated queries, fp32 ``[heads, P]``, blocks of heads.
    """

    impl = "triton"
    represent_tokens = code_kernels.write_codes
    writing: ClassVar = {"num_warps": 4, "enable_fp_fusion": False}

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        model, group, most = self.model, self.group, setup.max_queries
        wide = reference.width(group.head_dim)
        self.heads = HeadScores(model, group, BLOCK_U, setup.device, most)
        asking = {"WIDE": wide, "LOG_WIDE": wide.bit_length() - 1, **self.writing}
        scoring = {"WIDE": wide, "BYTES": max(16, wide // 8), "num_warps": 2}
        scoring |= {"PAIRS": self.params.outliers, "TILE": TILE, "TILES": TILES}
        self.asking, self.scoring = list[dict[str, Any]](), list[dict[str, Any]]()
        for queries in range(1, most + 1):
            held = min(model.group_size * queries, max(model.group_size, *REGISTERS))
            block = {"BLOCK_G": max(8, triton.next_power_of_2(held))}
            made = constants(code_kernels.query_kernel, setup, queries, **asking, **block)
            self.asking.append(made)
            made = constants(kernels.score_kernel, setup, queries, **scoring, **block)
            if not made["FP32"] and block["BLOCK_G"] in REGISTERS:
                made["maxnreg"] = REGISTERS[block["BLOCK_G"]]
            self.scoring.append(made)
        self.parts = [-(-each["GROUP"] // each["BLOCK_G"]) for each in self.scoring]
        rows = group.max_requests * model.num_kv_heads * self.parts[-1] * block["BLOCK_G"]
        self.rotated = torch.empty((rows, wide), dtype=torch.float32, device=setup.device)

    @property
    def options(self) -> tuple[int, ...]:
        wide = reference.width(self.group.head_dim)
        return self.params.outliers, wide, wide.bit_length() - 1

    def written(self, layer: LayerView) -> tuple[Tensor, ...]:
        pools = layer.pools
        return pools["codes"], pools["factor"].view(torch.int16), pools["outliers"], self.signs

    def lane_scores(self, layer: LayerView, q: Tensor) -> tuple[Tensor, Tensor]:
        group, step, pools = self.group, layer.step, layer.pools
        queries = q.shape[1] // self.model.num_heads
        parts = step.batch * group.num_kv_heads * self.parts[queries - 1]
        work = (self.heads.raw, self.heads.peak, self.heads.mass)
        code_kernels.query_kernel[(parts,)](
            *(q, self.signs, step.slots, self.rotated, q.stride(0), q.stride(1)),
            **self.asking[queries - 1],
        )
        kernels.score_kernel[(parts, self.heads.blocks)](
            *(q, self.rotated, pools["codes"].view(torch.uint8), pools["factor"]),
            *(pools["outliers"], step.slots, step.lengths, step.appended, step.page_table, *work),
            *(step.page_table.stride(0), group.max_units, self.heads.blocks, self.model.scale),
            *(q.stride(0), q.stride(1)),
            **self.scoring[queries - 1],
        )
        return self.heads.lanes(step, self.sink_units, self.recent_units, queries)
