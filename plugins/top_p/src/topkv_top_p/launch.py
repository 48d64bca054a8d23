"""Launches of the top-p kernels, and their scratch."""

from __future__ import annotations

from typing import ClassVar

import torch
import triton
from torch import Tensor

from topkv import hookimpl
from topkv.hooks.stage import StageSetup
from topkv.types import LayerView, Selection
from topkv_authoring.constants import constants
from topkv_authoring.units import KeptOfTokens
from topkv_top_p import kernels, key_kernels
from topkv_top_p.stage import TopP

TOKENS = 64
"""Tokens of a program of the kernel that weighs."""

PAIRS = 16384
"""Most candidates times query heads of a block of the kernel that prunes, in registers."""


class TopPTriton(KeptOfTokens, TopP):
    """Top-p in kernels, with every constant worked out once.

    Scratch: worth and then weight of candidates, fp32 ``[max_requests, Q * H, K']``, and ranks,
    int32 ``[max_requests * lanes, K']``, with K' padded so that vectors can be read.
    """

    represent_tokens = key_kernels.write_copies
    writing: ClassVar = {"num_warps": 4, "enable_fp_fusion": False}

    def __init__(self, setup: StageSetup) -> None:
        super().__init__(setup)
        model, group, device = self.model, self.group, setup.device
        offered = min(self.widen * group.select, group.max_units)
        self.padded = triton.cdiv(offered, 16) * 16
        rows = group.max_requests * self.padded
        most = setup.max_queries
        heads = model.num_heads * most
        self.worth = torch.empty(rows * heads, dtype=torch.float32, device=device)
        self.ranks = torch.empty(rows * group.lane_heads, dtype=torch.int32, device=device)
        wide = max(2, triton.next_power_of_2(model.head_dim))
        block_u = triton.next_power_of_2(group.unit)
        sizes = {"PAIRS": self.outliers, "BLOCK_W": max(16, wide // 2), "num_warps": 2}
        sizes |= {"BLOCK_C": max(1, TOKENS // block_u), "BLOCK_U": block_u}
        self.weighing, self.pruning = [], []
        for queries in range(1, most + 1):
            self.weighing.append(constants(kernels.worth_kernel, setup, queries, **sizes))
            self.pruning.append(self._pruning(queries * model.num_heads, offered))

    def _pruning(self, heads: int, offered: int) -> dict[str, int]:
        """Constants of the kernel that prunes, for the heads of all queries of a row."""
        group = self.group
        heads //= group.lane_heads
        block_g = triton.next_power_of_2(heads)
        most = triton.next_power_of_2(max(offered, 2))
        block_c = min(most, max(16, PAIRS // block_g))
        return {
            "HEADS": heads,
            "WHOLE": self.p == 1,
            "IN_PLACE": offered <= group.select,
            "UNIT_BITS": group.max_units.bit_length(),
            "BLOCK_C": block_c,
            "BLOCK_G": block_g,
            "num_warps": 4 if block_c * block_g <= PAIRS // 4 else 8,
        }

    @property
    def options(self) -> tuple[int, ...]:
        wide = max(2, triton.next_power_of_2(self.model.head_dim))
        return self.outliers, wide, wide.bit_length() - 1

    def written(self, layer: LayerView) -> tuple[Tensor, Tensor, Tensor]:
        pools = layer.pools
        return pools["codes"], pools["meta"].view(torch.int16), pools["outliers"]

    @hookimpl
    def refine(
        self, layer: LayerView, q: Tensor, candidates: Selection, out: Selection
    ) -> Selection:
        model, pools, step = self.model, layer.pools, layer.step
        lanes, offered = candidates.ids.shape
        weighing = self.weighing[q.shape[1] - 1]
        blocks = triton.cdiv(offered, weighing["BLOCK_C"])
        kernels.worth_kernel[(step.batch * model.num_kv_heads, blocks)](
            *(q, pools["codes"], pools["meta"], pools["outliers"], candidates.ids),
            *(step.slots, step.appended, step.page_table, self.worth),
            *(offered, step.page_table.stride(0), model.scale),
            *(*q.stride()[:3], candidates.ids.stride(0), self.padded),
            **weighing,
        )
        kernels.prune_kernel[(lanes,)](
            *(
                self.worth,
                self.ranks,
                candidates.ids,
                out.ids,
                offered,
                self.padded,
                out.ids.shape[1],
            ),
            *(float(self.p), candidates.ids.stride(0), out.ids.stride(0)),
            **self.pruning[q.shape[1] - 1],
        )
        return out
