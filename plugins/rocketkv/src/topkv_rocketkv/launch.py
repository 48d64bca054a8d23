"""RocketKV with its kernels: launches, and the scratch that they share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from topkv import hookimpl
from topkv.hooks.algorithm import AlgorithmSetup
from topkv.types import LayerView
from topkv_authoring.constants import constants
from topkv_authoring.lane_scores import HeadScores
from topkv_authoring.units import KeptByKernels
from topkv_rocketkv import kernels, reference
from topkv_rocketkv.algorithm import SETTLED, UNREAD, RocketKV

TILE_U, TILES, STAGES = 32, 4, 3
"""Units of a tile, tiles of one program of the score kernel, loads in flight."""

BLOCK_U = TILE_U * TILES
"""Units whose maximum and exponential sum are kept together."""


class RocketKVTriton(KeptByKernels, RocketKV):
    """RocketKV in kernels, with every constant worked out once.

    Votes stay in torch: they are cold. Scratch: ``HeadScores``; ``sides`` int8
    ``[max_requests * Hkv, D]`` and ``factors`` fp32 ``[max_requests * Hkv, BLOCK_G]`` of the
    queries, as ``kernels.query_kernel`` says.
    """

    impl = "triton"
    represent_unit = kernels.write_bounds

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        model, group, device = self.model, self.group, setup.device
        pairs = group.max_requests * model.num_kv_heads
        most = setup.max_queries
        self.heads = HeadScores(model, group, BLOCK_U, device, most)
        self.sides = torch.zeros((pairs, model.head_dim), dtype=torch.int8, device=device)
        sizes = {"TILE_U": TILE_U, "TILES": TILES, "STAGES": STAGES, "num_warps": 4}
        sizes["DROPPED"] = reference.DROPPED
        self.asking, self.scoring = list[dict[str, Any]](), list[dict[str, Any]]()
        for queries in range(1, most + 1):
            self.asking.append(constants(kernels.query_kernel, setup, queries, num_warps=4))
            self.scoring.append(constants(kernels.score_kernel, setup, queries, **sizes))
        shape = (pairs, self.asking[-1]["BLOCK_G"])
        self.factors = torch.empty(shape, dtype=torch.float32, device=device)

    @property
    def options(self) -> tuple[int, int]:
        """The kv-heads, and the units of a page."""
        return self.group.num_kv_heads, self.group.units_per_page

    @hookimpl
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        KeptByKernels.construct(self, layer, slot, start, k, v, q, lse)
        settled = layer.pools["state"][slot, SETTLED]
        self.gather_voters(layer, slot, start, k, q, lse, settled)

    def lane_scores(self, layer: LayerView, q: Tensor) -> tuple[Tensor, Tensor]:
        group, step, pools = self.group, layer.step, layer.pools
        pairs, queries = step.batch * group.num_kv_heads, q.shape[1] // self.model.num_heads
        unread = pools["state"][:, UNREAD]
        kernels.query_kernel[(pairs,)](
            *(q, step.slots, step.appended, unread, self.sides, self.factors, self.model.scale),
            *(q.stride(0), q.stride(1), unread.stride(0)),
            **self.asking[queries - 1],
        )
        work = (self.heads.raw, self.heads.peak, self.heads.mass)
        kernels.score_kernel[(pairs, self.heads.blocks)](
            *(q, self.sides, self.factors, pools["bounds"], pools["dropped"]),
            *(step.slots, step.lengths, step.appended, step.page_table, *work),
            *(step.page_table.stride(0), group.max_units, self.heads.blocks),
            *(q.stride(0), q.stride(1)),
            **self.scoring[queries - 1],
        )
        return self.heads.lanes(step, queries=queries)
