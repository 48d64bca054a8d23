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

MOST_G = 16
"""Most query heads that a program holds where rows have several queries; more share the tokens."""

REGISTERS = {8: 128, 16: 168}
"""Registers of a thread of the score kernel, by BLOCK_G: as many as it takes without the branch of
the outliers, where few tiles come by; with it the compiler would take a fifth more for all."""


def heads_of(group: int, queries: int) -> dict[str, int]:
    """Query heads of a kv-head, in all ``queries`` of a row, and those of a program."""
    heads = group * queries
    block = max(8, int(triton.next_power_of_2(min(heads, max(group, MOST_G)))))
    return {"GROUP": heads, "BLOCK_G": block}


class ParisKVTriton(KeptOfTokens, ParisKV):
    """ParisKV in kernels, with every constant worked out once.

    Scratch: ``HeadScores``, and rotated queries, fp32 ``[heads, P]``, those of a kv-head
    rounded up to whole blocks.
    """

    impl = "triton"
    represent_tokens = code_kernels.write_codes
    writing: ClassVar = {"num_warps": 4, "enable_fp_fusion": False}

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        model, group, device = self.model, self.group, setup.device
        wide = reference.width(group.head_dim)
        most, pairs = setup.max_queries, group.max_requests * model.num_kv_heads
        self.heads = HeadScores(model, group, BLOCK_U, device, most)
        geometry = {"KV_HEADS": model.num_kv_heads, "D": group.head_dim, "WIDE": wide}
        rotating = geometry | {
            "LOG_WIDE": wide.bit_length() - 1,
            "num_warps": 4,
            "enable_fp_fusion": False,
        }
        scoring = geometry | {
            "PAIRS": self.params.outliers,
            "PAGE": group.page_tokens,
            "TILE": TILE,
            "TILES": TILES,
            "BYTES": max(16, wide // 8),
            "FP32": model.dtype is torch.float32 or device.type == "cpu",
            "num_warps": 2,
        }
        several = [heads_of(model.group_size, queries + 1) for queries in range(most)]
        self.parts = [-(-each["GROUP"] // each["BLOCK_G"]) for each in several]
        rows = pairs * self.parts[-1] * several[-1]["BLOCK_G"]
        self.rotated = torch.empty((rows, wide), dtype=torch.float32, device=device)
        self.asking = [rotating | each for each in several]
        self.scoring = [scoring | each | {"QUERIES": nth + 1} for nth, each in enumerate(several)]
        for each in self.scoring:
            if not each["FP32"] and each["BLOCK_G"] in REGISTERS:
                each["maxnreg"] = REGISTERS[each["BLOCK_G"]]

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
