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
        pairs = group.max_requests * model.num_heads * self.shares

        def scratch(each: int) -> Tensor:
            return torch.empty(pairs * each, dtype=torch.float32, device=device)

        self.peak, self.mass, self.sum = scratch(1), scratch(1), scratch(model.head_dim)
        sizes = {"TILE_U": TILE_U, "TILES": TILES, "STAGES": STAGES, "BLOCK_K": BLOCK_K}
        self.weighing = constants(kernels.weigh_kernel, setup, num_warps=4, **sizes)
        self.adding = constants(
            kernels.add_kernel,
            setup,
            HEADS=model.num_heads,
            SHARE_UNITS=TILE_U * TILES,
            num_warps=1,
        )

    @hookimpl
    def correct(
        self, layer: LayerView, q: Tensor, selection: Selection, out: Tensor, lse: Tensor
    ) -> None:
        model, group, step = self.model, self.group, layer.step
        work = (self.peak, self.mass, self.sum)
        kernels.weigh_kernel[(step.batch * model.num_kv_heads, self.shares)](
            *(q, layer.pools["means"], selection.ids),
            *(step.slots, step.lengths, step.page_table, *work),
            *(step.page_table.stride(0), self.shares, selection.ids.shape[1], model.scale),
            *(math.log(group.unit), q.stride(0), q.stride(2), selection.ids.stride(0)),
            **self.weighing,
        )
        kernels.add_kernel[(step.batch * model.num_heads,)](
            *(step.slots, step.lengths, *work, out, lse),
            *(self.shares, out.stride(0), out.stride(2)),
            **self.adding,
        )
