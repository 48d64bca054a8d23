"""Launches of the Double Sparsity kernels, and their scratch."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from attrs import frozen
from torch import Tensor

from topkv import hookimpl
from topkv.hooks.algorithm import AlgorithmSetup
from topkv.ops.topk import topk
from topkv.types import LayerView, Selection
from topkv_authoring.sticky import prefer_resident
from topkv_authoring.units import KeptOfTokens
from topkv_double_sparsity import kernels, label_kernels, reference, sample_kernels
from topkv_double_sparsity.algorithm import DoubleSparsity

COLUMNS = 16
"""Columns of a bundle at least: as many as a product takes."""

BUNDLES = {
    (False, False): (16, 256),
    (False, True): (32, 512),
    (True, False): (16, 64),
    (True, True): (16, 64),
}
"""Most columns of a bundle, and most bytes of the labels of a token that a bundle loads at once;
by whether labels are 4 bit and whether all kv-heads share a lane. 4-bit labels grow fourfold in
registers, and for float32 models, which get a quarter of that, eightfold."""

SCORING = {
    (False, False): (32, 8, 5, 1),
    (False, True): (32, 8, 5, 1),
    (True, False): (64, 4, 5, 1),
    (True, True): (64, 8, 5, 1),
}
"""Tokens of a tile, tiles of a program, stages and warps of the score kernel, by the keys of
``BUNDLES``. The look-up of the page is a stage of its own, as long as that of the labels: 5 stages
keep two tiles of labels in flight, 3 keep one."""

SAMPLE_TILE, SAMPLE_TILES, SAMPLE_STAGES, SAMPLE_WARPS = 64, 4, 3, 4
"""Tokens of a tile, tiles of a program, stages and warps of the sample kernel."""

SPAN = SAMPLE_TILE * SAMPLE_TILES
"""Sampled tokens whose maximum and exponential sum are kept together."""

_BITS = {2: torch.int16, 4: torch.int32}


def _power(n: int) -> int:
    return int(triton.next_power_of_2(n))


def _bundle(kv_heads: int, group: int, size: int, columns: int, row: int) -> int:
    """kv-heads of one product: as many as fit, a divisor of all of them.

    Args:
        size: bytes of the label of a token and kv-head.
        columns, row: most columns and bytes.
    """
    fits = [
        n
        for n in range(1, kv_heads + 1)
        if _power(n) * _power(group) <= columns and n * size <= row
    ]
    return max((n for n in fits if kv_heads % n == 0), default=1)


@frozen
class Sizes:
    """Constants of the kernels for rows of a number of queries.

    Attributes:
        bundles: of a row.
        columns: of the matrix of queries of a bundle, the query heads of all queries of a row.
        codes: its rows.
        blocks, score_blocks: programs of a bundle of the kernels that sample and that score.
        words: labels are read as this, or as they are.
        sampling, scoring: of these kernels.
    """

    bundles: int
    columns: int
    codes: int
    blocks: int
    score_blocks: int
    words: torch.dtype | None
    sampling: dict[str, Any]
    scoring: dict[str, Any]


class DoubleSparsityTriton(KeptOfTokens, DoubleSparsity):
    """Double Sparsity by kernels, with every constant worked out once.

    Scratch: fp32 scores ``[rows, U]``, U rounded up to 16; and for each request slot and bundle
    of kv-heads the block-diagonal matrix of queries, its column sums, and of each block of the
    sample the maximum and the exponential sum of each column.
    """

    represent_tokens = label_kernels.write_labels
    rows = 32, 4

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        group, device, most = self.group, setup.device, setup.max_queries
        self.several = [self._sizes_of(device, queries + 1) for queries in range(most)]
        # In logarithms of base 2, as all scores are.
        self.scale = self.model.scale * math.log2(math.e)
        self.bonus = self.settings.sticky * math.log2(math.e)
        floats: dict[str, Any] = {"dtype": torch.float32, "device": device}
        rows = group.max_requests
        columns = rows * max(each.columns * each.bundles for each in self.several)
        matrices = max(each.columns * each.bundles * each.codes for each in self.several)
        sampled = max(each.columns * each.bundles * each.blocks for each in self.several)
        self.query = torch.empty(rows * matrices, dtype=self.model.dtype, device=device)
        self.total = torch.empty(columns, **floats)
        self.peak, self.mass = torch.empty((2, rows * sampled), **floats)
        self.scores = torch.empty((group.max_lanes, -(-group.max_units // 16) * 16), **floats)
        self.closed = torch.zeros(group.max_lanes, dtype=torch.int32, device=device)
        self.work = setup.topk(group.max_lanes, group.max_units, group.select)

    @property
    def words(self) -> torch.dtype | None:
        """Labels are read as this, or as they are."""
        return self.several[0].words

    def _sizes_of(self, device: torch.device, queries: int) -> Sizes:
        model, settings = self.model, self.settings
        group = model.group_size * queries
        width = (settings.channels + 1) // 2 if settings.int4 else settings.channels
        item = 1 if settings.int4 else model.dtype.itemsize
        shared = self.group.lane_heads != model.num_kv_heads
        columns, row = BUNDLES[settings.int4, shared]
        if settings.int4 and model.dtype is torch.float32:
            row //= 4
        bundle = _bundle(model.num_kv_heads, group, width * item, columns, row)
        block_g = _power(group)
        block_h = max(_power(bundle), COLUMNS // block_g)
        # Two bytes at once where two bfloat16 codes can be made by one instruction.
        packed = device.type == "cuda" and model.dtype is torch.bfloat16 and width % 2 == 0
        packed = packed and settings.int4
        words = width // 2 if packed else width
        labels = {
            "KV_HEADS": model.num_kv_heads,
            "PAGE": self.group.page_tokens,
            "QUERIES": queries,
            "GROUP": group,
            "HEADS": bundle,
            "WORDS": words,
            "PARTS": (4 if packed else 2) if settings.int4 else 1,
            "BLOCK_K": max(16, _power(bundle * words)),
            "BLOCK_H": block_h,
            "BLOCK_G": block_g,
            "FAST": device.type == "cuda",
            "FP32": model.dtype is torch.float32 or device.type == "cpu",
            "SAMPLE": reference.SAMPLE,
            "DOUBLINGS": reference.doublings(self.group.max_units),
        }
        return self._kernels(labels, shared, torch.int16 if packed else None)

    def _kernels(self, labels: dict[str, Any], shared: bool, words: torch.dtype | None) -> Sizes:
        model, settings = self.model, self.settings
        columns, bundles = labels["BLOCK_H"] * labels["BLOCK_G"], 1
        normalised = self.group.lane_heads < model.num_heads * labels["QUERIES"]
        sampling = labels | {
            "R": settings.channels,
            "SAMPLING": normalised,
            "TILE": SAMPLE_TILE,
            "TILES": SAMPLE_TILES,
            "STAGES": SAMPLE_STAGES,
            "num_warps": SAMPLE_WARPS,
        }
        tile, tiles, stages, warps = SCORING[settings.int4, shared]
        every = model.num_kv_heads // labels["HEADS"]
        bundles = every if shared else 1
        units = max(self.group.max_units, 1)
        blocks = triton.cdiv(min(units, reference.SAMPLE), SPAN)
        scoring = labels | {
            "BUNDLES": bundles,
            "PER_HEAD": not shared,
            "BLOCK_B": _power(bundles),
            "BLOCK_P": _power(blocks),
            "SPAN": SPAN,
            "NORMALISED": normalised,
            "TILE": tile,
            "TILES": tiles,
            "STAGES": stages,
            "num_warps": warps if columns <= 64 else 4,
        }
        codes = labels["PARTS"] * labels["BLOCK_K"]
        counts = (blocks if normalised else 1, triton.cdiv(units, tile * tiles))
        return Sizes(every, columns, codes, *counts, words, sampling, scoring)

    def readable(self, layer: LayerView) -> tuple[Tensor, Tensor]:
        """Labels and meta as the scoring kernels take them."""
        labels = layer.pools["labels"]
        meta = layer.pools["meta"].view(torch.int32) if self.settings.int4 else labels
        return labels.view(self.words) if self.words else labels, meta

    def score(self, layer: LayerView, q: Tensor) -> tuple[Tensor, Tensor]:
        """Scores ``[N, U]`` of the lanes of queries ``[B, Q * H, D]``, and tokens of lanes."""
        group, step, (channels, ranges) = self.group, layer.step, self._looked_at(layer)
        each = self.several[q.shape[1] // self.model.num_heads - 1]
        where = (*self.readable(layer), step.slots, step.lengths, step.appended, step.page_table)
        work = (self.query, self.total, self.peak, self.mass)
        sizes = (step.page_table.stride(0), each.blocks, self.scale)
        bundles = step.batch * each.bundles
        sample_kernels.sample_kernel[(bundles, each.blocks)](
            *(q, channels, ranges, *work, *where, *sizes),
            *(q.stride(0), q.stride(1), channels.stride(0), ranges.stride(0)),
            **each.sampling,
        )
        lanes = step.batch * group.lane_heads
        kernels.score_kernel[(bundles // each.scoring["BUNDLES"], each.score_blocks)](
            *(*work, *where, self.scores, self.closed, *sizes),
            *(self.scores.stride(0), self.settings.sinks),
            **each.scoring,
        )
        scores, closed = self.scores[:lanes, : group.max_units], self.closed[:lanes]
        prefer_resident(layer, scores, closed, self.bonus, impl="triton")
        return scores, closed

    @property
    def options(self) -> tuple[int, ...]:
        settings, heads = self.settings, self.group.num_kv_heads
        width = (settings.channels + 1) // 2 if settings.int4 else settings.channels
        each = 0 if self.fixed is not None else heads * settings.channels
        return (
            *(settings.channels, width, settings.int4, self.model.dtype is torch.bfloat16),
            *(max(2, _power(width)), each, 2 * each),
        )

    def keys(self, k: Tensor) -> Tensor:
        """Keys, viewed as integers where labels are unchanged elements, or keys are bfloat16."""
        as_bits = not self.settings.int4 or self.model.dtype is torch.bfloat16
        k = super().keys(k)
        return k.view(_BITS[k.element_size()]) if as_bits else k

    def written(self, layer: LayerView) -> tuple[Tensor, ...]:
        labels = layer.pools["labels"]
        meta = layer.pools.get("meta", labels)
        if not self.settings.int4:
            labels = labels.view(_BITS[labels.element_size()])
        return labels, meta, *self._looked_at(layer)

    construct = DoubleSparsity.construct  # chooses channels, and asks for ``_represent``

    def _represent(self, layer: LayerView, slot: int, start: int, k: Tensor) -> None:
        self.construct_tokens(layer, slot, start, k)

    def _looked_at(self, layer: LayerView) -> tuple[Tensor, Tensor]:
        """Channels and ranges as the kernels take them; ranges are read for 4-bit labels alone."""
        channels = self.channels(layer)
        return channels, self.ranges(layer) if self.settings.int4 else channels

    @hookimpl
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, weights: Tensor | None, out: Selection
    ) -> Selection:
        scores, closed = self.score(layer, self._queries(q))
        topk(scores, closed, out.ids, impl="triton", work=self.work)
        return out
