"""Launches of the kernels for latent attention: constants, splits, scratch."""

from __future__ import annotations

import math
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from topkv.types import Tables
from topkv_triton_attention.decode_kernels import merge_kernel
from topkv_triton_attention.launch import (
    INTERPRETED,
    MAX_SPLITS,
    power,
    processors_of,
    split_count,
    upcast,
)
from topkv_triton_attention.mla_kernels import attend_latent_kernel
from topkv_triton_attention.mla_reference import LatentShape, check_latent

MIN_SPLIT_TOKENS = 64
"""Less than for grouped queries: a row meets all heads, so a split of few tokens is much work."""
MAX_WAVES = 2
"""Twice as many programs as run at once balance well, and bound the scratch."""
_MERGE_DIM = 128


@frozen
class LatentLaunch:
    """Launch constants of ``attend_latent_kernel``.

    Attributes:
        heads: heads of a program.
        block: tokens per iteration.
        num_warps, num_stages: of the launch.
        resident: programs that one multiprocessor runs at once.
    """

    heads: int
    block: int
    num_warps: int
    num_stages: int
    resident: int


# By row format and by heads, up to 16 and above: the fast products of Hopper take 64 heads, those
# of 32 go no faster.
_LATENT = {
    ("model", 16): LatentLaunch(16, 32, 4, 3, 2),
    ("model", 64): LatentLaunch(64, 64, 8, 2, 1),
    ("fp8", 16): LatentLaunch(16, 32, 4, 2, 2),
    ("fp8", 64): LatentLaunch(64, 64, 8, 3, 1),
}


def latent_launch(kv_format: str, heads: int, itemsize: int) -> LatentLaunch:
    """Launch constants for a row format, a number of heads, and bytes per element of q."""
    launch = _LATENT[kv_format, 16 if heads <= 16 else 64]
    if itemsize == 4:
        # Exact fp32 products run outside the tensor cores: a small block stays in registers.
        return evolve(launch, heads=16, block=16)
    return launch


class LatentDecoder:
    """``attend`` of the hook specs for latent attention.

    Args:
        max_batch: most rows of one call.
        heads: query heads of a token.
        shape: of the rows.
        dtype: of q.
        scale: factor of the logits.
        device: where q lives.
        launch: launch constants; None takes those of the table above.
        splits: splits of every call; None chooses them from the shapes.
        max_queries: most queries of a row. Heads of several are one list of heads.
    """

    def __init__(
        self,
        max_batch: int,
        heads: int,
        shape: LatentShape,
        dtype: torch.dtype,
        scale: float,
        device: torch.device,
        launch: LatentLaunch | None = None,
        splits: int | None = None,
        max_queries: int = 1,
    ) -> None:
        self.max_batch, self.max_queries = max_batch, max_queries
        self.heads, self.shape = heads, shape
        self.scale_log2 = scale * math.log2(math.e)
        self.splits, self.processors = splits, processors_of(device)
        self.launches = [
            launch or latent_launch(shape.kv_format, heads * queries, dtype.itemsize)
            for queries in range(1, max_queries + 1)
        ]
        rows = max(
            self._most_parts(heads * queries, launch)
            for queries, launch in enumerate(self.launches, start=1)
        )
        self.part = torch.empty(rows * shape.latent, dtype=torch.float32, device=device)
        self.part_lse = torch.empty(rows, dtype=torch.float32, device=device)

    def _most_parts(self, heads: int, launch: LatentLaunch) -> int:
        """Most partial results of a call with this many heads of all queries of a row."""
        rows = self.max_batch * heads * (self.splits or MAX_SPLITS)
        if self.splits is None:
            # split_count makes at most this many programs when it splits at all.
            programs = MAX_WAVES * self.processors * launch.resident
            rows = min(rows, programs * -(-heads // -(-heads // launch.heads)))
        return rows

    def split_count(self, lanes: int, tokens: int, queries: int = 1) -> int:
        """Splits of a call with this many lanes, of at most N tokens each."""
        launch = self.launches[queries - 1]
        return self.splits or split_count(
            lanes * -(-self.heads * queries // launch.heads),
            tokens,
            self.processors * launch.resident,
            launch.block,
            MIN_SPLIT_TOKENS,
            MAX_WAVES,
        )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, out: Tensor, lse: Tensor
    ) -> None:
        """See ``topkv.hooks.backend.Backend.attend``; ``v`` is not read. Allocates nothing."""
        shape = self.shape
        check_latent(q, k, shape, self.max_batch, self.max_queries)
        table, lengths = tables.table, tables.lengths
        lanes, queries, heads, _ = q.shape
        if not lanes:
            return
        launch = self.launches[queries - 1]
        unit, dim, each = k.shape[2], shape.latent, heads * queries
        splits = self.split_count(lanes, table.shape[1] * unit, queries)
        # Strides by row, head and split of what the kernel writes.
        if splits == 1:
            results = out, lse
            strides = (out.stride(0), out.stride(2), 0, lse.stride(0), lse.stride(2), 0)
        else:
            results = self.part, self.part_lse
            strides = (each * splits * dim, splits * dim, dim, each * splits, splits, 1)
        several: dict[str, Any] = {}
        merging: dict[str, Any] = {}
        if queries > 1:
            merging = {"QUERIES": queries, "stride_oq": out.stride(1), "stride_lq": lse.stride(1)}
            parts = heads * splits
            to = (out.stride(1), lse.stride(1)) if splits == 1 else (parts * dim, parts)
            names = ("QUERIES", "queries_ptr", "stride_qq", "stride_oq", "stride_lq")
            values = (queries, tables.queries, q.stride(1), *to)
            several = dict(zip(names, values, strict=True))
        attend_latent_kernel[(lanes * -(-each // launch.heads), splits)](
            q, k, table, lengths, *results, self.scale_log2,
            q.stride(0), q.stride(2), k.stride(0), k.stride(2),
            *table.stride(), lengths.stride(0), *strides,
            HEADS=heads, UNIT=unit, LATENT=dim, ROPE=shape.rope, TILES=shape.tiles,
            BLOCK_H=launch.heads, BLOCK_L=max(16, power(dim)),
            BLOCK_R=max(16, power(max(1, shape.rope))), BLOCK_N=launch.block,
            UPCAST=upcast(q), INTERPRETED=INTERPRETED,
            num_warps=launch.num_warps, num_stages=launch.num_stages, **several,
        )  # fmt: skip
        if splits > 1:
            block = min(_MERGE_DIM, power(dim))
            merge_kernel[(lanes * each, -(-dim // block))](
                self.part, self.part_lse, out, lse, splits,
                out.stride(0), out.stride(2), lse.stride(0), lse.stride(2),
                HEADS=heads, DIM=dim, BLOCK_D=block, BLOCK_S=power(splits), num_warps=4,
                **merging,
            )  # fmt: skip
