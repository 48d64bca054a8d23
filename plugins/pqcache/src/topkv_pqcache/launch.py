"""Launches of the PQCache kernels, and their scratch."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from topkv import hookimpl
from topkv.hooks.algorithm import AlgorithmSetup
from topkv.types import LayerView
from topkv_authoring.lane_scores import HeadScores
from topkv_pqcache import code_kernels, kernels
from topkv_pqcache.algorithm import BITS, PQCache

TILE, TILES = 128, 8
"""Tokens of a tile, tiles of one program of the score kernel."""

CHANNELS = 32
"""Channels of open keys that a program of the score kernel holds at a time."""

BLOCK_U = TILE * TILES
"""Tokens whose maximum and exponential sum are kept together."""

BLOCK_T = 16
"""Tokens of one program of the kernel that encodes what is settled."""


class PQCacheTriton(PQCache):
    """PQCache in kernels, with every constant worked out once.

    Codebooks are trained in torch: that is cold. Scratch: ``HeadScores``, and the tables, fp32
    ``[max_requests * Hkv, P, m, C, G]``, G of all queries of a row, rounded up to a power of two.
    """

    impl = "triton"

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        model, group, device = self.model, self.group, setup.device
        pairs = group.max_requests * model.num_kv_heads
        grouped = triton.next_power_of_2(model.group_size * setup.max_queries)
        shape = (pairs, self.books, self.subvectors, self.count, grouped)
        self.table = torch.empty(shape, dtype=torch.float32, device=device)
        self.heads = HeadScores(model, group, BLOCK_U, device, setup.max_queries)
        self.bits = BITS[model.dtype.itemsize]
        part, whole = group.head_dim // self.subvectors, group.head_dim
        block_part, block_whole = (triton.next_power_of_2(dim) for dim in (part, whole))
        heads = {"KV_HEADS": model.num_kv_heads, "num_warps": 4}
        self.following = heads | {"PLACES": self.places, "D": whole, "BLOCK_D": block_whole}
        codes = heads | {"SUB": self.subvectors, "COUNT": self.count}
        self.coding = codes | {
            "D": part,
            "BLOCK_D": block_part,
            "LOG_D": block_part.bit_length() - 1,
            "BLOCK_T": BLOCK_T,
            "enable_fp_fusion": False,
        }
        asking = codes | {
            "D": part,
            "BLOCK_C": max(16, self.count),
            "BLOCK_D": max(16, block_part),
            "FP32": model.dtype is torch.float32 or device.type == "cpu",
        }
        scoring = codes | {
            "PLACES": self.places,
            "D": whole,
            "BLOCK_D": min(block_whole, CHANNELS),
            "TILE": TILE,
            "TILES": TILES,
            "BLOCK_P": max(2, triton.next_power_of_2(self.books)),
        }
        self.asking, self.scoring = [], []
        for queries in range(1, setup.max_queries + 1):
            each = model.group_size * queries
            heads = {"GROUP": each, "GROUPED": triton.next_power_of_2(each)}
            self.asking.append(asking | heads | {"BLOCK_G": max(16, heads["GROUPED"])})
            self.scoring.append(scoring | heads | {"QUERIES": queries})

    def encode(self, layer: LayerView, slot: int, book: int, start: int, keys: Tensor) -> None:
        pools, heads = layer.pools, self.group.num_kv_heads
        if keys.stride(-1) != 1:
            keys = keys.contiguous()
        grid = (triton.cdiv(len(keys), BLOCK_T), heads, self.subvectors)
        code_kernels.encode_kernel[grid](
            *(keys, pools["centroids"], pools["codes"], slot, book, start, len(keys)),
            *(self.books, self.group.max_units, keys.stride(0), keys.stride(1)),
            **self.coding,
        )

    @hookimpl
    def update(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        step, keys, queries = layer.step, layer.pools["keys"], k.shape[1]
        code_kernels.update_kernel[(step.batch * queries, self.group.num_kv_heads)](
            *(k.view(self.bits), keys.view(self.bits)),
            *(step.slots, step.lengths, step.appended, *k.stride()[:3]),
            QUERIES=queries,
            **self.following,
        )

    def lane_scores(self, layer: LayerView, q: Tensor) -> tuple[Tensor, Tensor]:
        step, pools, heads = layer.step, layer.pools, self.heads
        queries = q.shape[1] // self.model.num_heads
        pairs, strides = step.batch * self.group.num_kv_heads, (q.stride(0), q.stride(1))
        kernels.table_kernel[(pairs, self.books, self.subvectors)](
            *(q, pools["centroids"], pools["state"], step.slots, self.table),
            *(self.books, self.model.scale, *strides),
            **self.asking[queries - 1],
        )
        kernels.score_kernel[(pairs, heads.blocks)](
            *(q, self.table, pools["codes"], pools["starts"], pools["keys"], pools["state"]),
            *(step.slots, step.lengths, step.appended, heads.raw, heads.peak, heads.mass),
            *(self.books, self.group.max_units, heads.blocks, self.model.scale, *strides),
            **self.scoring[queries - 1],
        )
        return heads.lanes(step, self.sink_units, self.recent_units, queries)
