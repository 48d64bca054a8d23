"""Launches of the residual kernels, and their scratch."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from topkv import hookimpl
from topkv.hooks.stage import StageSetup
from topkv.types import LayerView, Selection
from topkv_authoring.constants import constants
from topkv_authoring.units import KeptByKernels
from topkv_residual import kernels
from topkv_residual.stage import Residual

TILE_U, TILES, STAGES = 32, 4, 2
"""Units of a tile, tiles of one program, loads in flight."""

BLOCK_K = 64
"""Ids that a tile is compared with at a time."""


class ResidualTriton(KeptByKernels, Residual):
    """The estimate in kernels, with every constant worked out once.

    Scratch: D + 2 numbers in fp32 for each query head and share of ``TILE_U * TILES`` units.
    """

    represent_unit = kernels.write_summary

    def __init__(self, setup: StageSetup) -> None:
        super().__init__(setup)
        model, group, device = self.model, self.group, setup.device
        self.shares = triton.cdiv(group.max_units, TILE_U * TILES)
        most = setup.max_queries
        pairs = group.max_requests * model.num_heads * most * self.shares

        def scratch(each: int) -> Tensor:
            return torch.empty(pairs * each, dtype=torch.float32, device=device)

        self.peak, self.mass, self.sum = scratch(1), scratch(1), scratch(model.head_dim)
        sizes = {"TILE_U": TILE_U, "TILES": TILES, "STAGES": STAGES, "BLOCK_K": BLOCK_K}
        own = {"HEADS": model.num_heads, "SHARE_UNITS": TILE_U * TILES, "num_warps": 1}
        self.weighing, self.adding = [], []
        for queries in range(1, most + 1):
            weighing = constants(kernels.weigh_kernel, setup, queries, num_warps=4, **sizes)
            self.weighing.append(weighing)
            self.adding.append(constants(kernels.add_kernel, setup, queries, **own))

    @hookimpl
    def correct(
        self, layer: LayerView, q: Tensor, selection: Selection, out: Tensor, lse: Tensor
    ) -> None:
        model, group, step = self.model, self.group, layer.step
        work, queries = (self.peak, self.mass, self.sum), q.shape[1]
        rows = (step.slots, step.lengths, step.appended)
        kernels.weigh_kernel[(step.batch * model.num_kv_heads, self.shares)](
            *(q, layer.pools["means"], selection.ids),
            *(*rows, step.page_table, *work),
            *(step.page_table.stride(0), self.shares, selection.ids.shape[1], model.scale),
            *(math.log(group.unit), *q.stride()[:3], selection.ids.stride(0)),
            **self.weighing[queries - 1],
        )
        kernels.add_kernel[(step.batch * queries * model.num_heads,)](
            *(*rows, *work, out, lse, self.shares, *out.stride()[:3]),
            **self.adding[queries - 1],
        )
