"""ClusterKV with its kernels: launches, and the scratch that they share."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from topkv import hookimpl
from topkv.hooks.algorithm import AlgorithmSetup
from topkv.types import LayerView, Selection
from topkv_authoring.constants import constants
from topkv_clusterkv import kernels
from topkv_clusterkv.algorithm import ClusterKV, only_query

TILE_C, TILES, STAGES = 32, 2, 2
"""Clusters of a tile, tiles of one program of the score kernel, loads in flight."""

BLOCK = TILE_C * TILES
"""Clusters whose maximum and exponential sum are kept together."""

BLOCK_K = 256
"""Ids of one program of the expansion."""

_BITS = {2: torch.int16, 4: torch.int32}


class ClusterKVTriton(ClusterKV):
    """ClusterKV that decodes in kernels, with every constant worked out once.

    Scratch: scaled scores fp32 ``[max_requests * H, C]``, maximum and exponential sum of each
    block of clusters ``[max_requests * H, blocks]``, and the members taken, as prefix sums, int32
    ``[rows, C]``.
    """

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        model, group, device = self.model, self.group, setup.device
        self.clusters = self.settings.max_clusters(group.max_units)
        self.blocks = triton.cdiv(self.clusters, BLOCK)
        floats = {"dtype": torch.float32, "device": device}
        heads = group.max_requests * model.num_heads
        self.raw = torch.empty((heads, self.clusters), **floats)
        self.peak = torch.empty((heads, self.blocks), **floats)
        self.mass = torch.empty((heads, self.blocks), **floats)
        self.upto = torch.empty((group.max_lanes, self.clusters), dtype=torch.int32, device=device)
        self.bits = _BITS[model.dtype.itemsize]
        block_c = max(16, triton.next_power_of_2(self.clusters))
        self.updating = constants(kernels.update_kernel, setup, PENDING=self.pending, num_warps=1)
        sizes = {"TILE_C": TILE_C, "TILES": TILES, "STAGES": STAGES, "num_warps": 1}
        self.scoring = constants(kernels.score_kernel, setup, **sizes)
        self.taking = constants(
            kernels.take_kernel,
            setup,
            BLOCK=BLOCK,
            BLOCK_P=max(2, triton.next_power_of_2(self.blocks)),
            BLOCK_C=block_c,
            STEPS=max(group.max_units, 1).bit_length(),
            num_warps=min(max(block_c // 512, 1), 16),
        )
        self.expanding = constants(
            kernels.expand_kernel,
            setup,
            BLOCK_K=min(BLOCK_K, max(16, triton.next_power_of_2(group.select))),
            STEPS=self.clusters.bit_length(),
            num_warps=2,
        )

    @hookimpl
    def update(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        k = k[:, 0]
        step, pools = layer.step, layer.pools
        if k.stride(-1) != 1:
            k = k.contiguous()
        kernels.update_kernel[(step.batch, self.group.num_kv_heads)](
            *(k.view(self.bits), pools["keys"].view(self.bits), pools["state"]),
            *(step.slots, step.lengths, step.appended, k.stride(0), k.stride(1)),
            **self.updating,
        )

    @hookimpl
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, weights: Tensor | None, out: Selection
    ) -> Selection:
        self.score(layer, only_query(q))
        self.take(layer, out.ids.shape[1])
        self.expand(layer, out.ids)
        return out

    def score(self, layer: LayerView, q: Tensor) -> None:
        step, pools = layer.step, layer.pools
        kernels.score_kernel[(step.batch * self.group.num_kv_heads, self.blocks)](
            *(q, pools["centroids"], pools["ends"], pools["state"], step.slots),
            *(self.raw, self.peak, self.mass, self.clusters, self.blocks, self.model.scale),
            *(q.stride(0), q.stride(1)),
            **self.scoring,
        )

    def take(self, layer: LayerView, select: int) -> None:
        step, pools = layer.step, layer.pools
        kernels.take_kernel[(step.batch * self.group.num_kv_heads,)](
            *(self.raw, self.peak, self.mass, pools["ends"], pools["members"], pools["state"]),
            *(step.slots, step.lengths, self.upto),
            *(self.clusters, self.group.max_units, self.blocks, select, self.settings.sinks),
            **self.taking,
        )

    def expand(self, layer: LayerView, ids: Tensor) -> None:
        step, pools = layer.step, layer.pools
        lanes = step.batch * self.group.num_kv_heads
        kernels.expand_kernel[(lanes, triton.cdiv(ids.shape[1], self.expanding["BLOCK_K"]))](
            *(self.upto, pools["ends"], pools["members"], pools["state"]),
            *(step.slots, step.lengths, ids, ids.stride(0)),
            *(self.clusters, self.group.max_units, ids.shape[1], self.settings.sinks),
            **self.expanding,
        )
