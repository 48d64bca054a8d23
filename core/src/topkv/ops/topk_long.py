"""Exact top-k of long rows: a pivot from a sample, a bit per element, a block of candidates.

Three kernels, the first and last with one program per row, the second with one per slice:

1. ``pivot_kernel`` draws a random sample of the row and takes a key that in all likelihood a few
   more than K elements reach: the pivot. It is a guess; nothing below trusts it.
2. ``mark_kernel`` reads the row once and writes two bits per element: above the pivot, equal to
   it. Counting and ordering are left to the next kernel, which sees all slices of its row.
3. ``collect_kernel`` counts the bits, exactly. With G above and E equal to the pivot:
   - G >= K: the K best lie among the G. List their indices, ascending, and select among them.
   - G < K <= G + E: the pivot is the K-th key. The G and the first K - G of the E, in order of
     index, are the result; any number of ties costs no more than this.
   - G + E < K, or G exceeds the block: the guess was bad. Walk the row from memory.
   So the result is exact whatever the sample was; only the time depends on it.

The list holds a count of elements that only luck and the scores decide, but its size, all grids
and all blocks depend on shapes alone. Nothing is accumulated across programs, so there is no
counter to reset, and the order in which programs run does not matter.

Odds of the walk for a sample of independent draws: the number of sampled keys among the K best is
about Poisson with mean m = SAMPLES * K / length. The pivot's rank in the sample is m + 3.5 sqrt(m)
+ 4, and the block has room for 5 more deviations: some 1e-4 a row. Positions are drawn at
random within equal strata, so that periodic scores mislead it no more than others.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from topkv.ops import early
from topkv.ops import topk_long_kernels as kernels

SAMPLES = 4096
"""Elements of a row that its pivot is drawn from; a power of two."""

PIVOT_SIGMAS = 3.5
"""How far the pivot's rank in the sample stays on the safe side of the expected one."""

ROOM_SIGMAS = 5.0
"""Room in the block of candidates for the error of the sample."""

SLACK = 16
"""The search for the pivot ends within one SLACKth of its rank: passes against candidates."""

MIN_CANDIDATES = 1024
"""Smallest block of candidates; rows of at most as many elements need no pivot."""

MAX_CANDIDATES = 32768
"""Largest block of candidates: what a program can hold, and two counts in one word."""

SLICE = 8192
"""Elements that one program marks; a multiple of 32."""

PIVOT_WARPS = 16
MARK_WARPS = 8
COLLECT_WARPS = 8

WORD_BLOCK = 2048
"""Words of 32 bits per iteration where a program reads the marks of its row."""

WALK_BLOCK = 4096
"""Elements per iteration where a program walks its row."""

PAD_BLOCK = 512
"""Ids per iteration where a program writes padding."""

EARLY = True
"""Whether to use programmatic dependent launch where the device has it."""


def candidate_block(columns: int, select: int) -> int:
    """Room for the candidates of the longest row; at least ``select``.

    The need grows with the length of a row, so shorter rows fit as well.
    """
    mean = SAMPLES * select / columns
    most = (mean + PIVOT_SIGMAS * math.sqrt(mean) + 4) * (1 + 1 / SLACK)
    need = (most + ROOM_SIGMAS * math.sqrt(most)) * columns / SAMPLES
    room: int = triton.next_power_of_2(max(math.ceil(need), select))
    return max(MIN_CANDIDATES, room)


def _words(columns: int) -> int:
    """Words of marks of a row, whole slices."""
    slices: int = triton.cdiv(columns, SLICE)
    return slices * (SLICE // 32)


def workspace(rows: int, columns: int, block: int, device: torch.device) -> Tensor:
    """int32 ``[rows, words]``: marks above, marks equal, list, pivot; multiples of 16 bytes."""
    width = 2 * _words(columns) + block + 4
    return torch.empty((rows, width), dtype=torch.int32, device=device)


def topk(scores: Tensor, lengths: Tensor, ids: Tensor, block: int, work: Tensor) -> None:
    """Launches, with room for ``block`` candidates from :func:`candidate_block`.

    Raises:
        ValueError: ``work`` is not a workspace of these rows, columns and candidates.
    """
    rows, columns = scores.shape
    select, words = ids.shape[1], _words(columns)
    if work.shape[0] < rows or work.shape[1] < 2 * words + block + 4:
        raise ValueError(
            f"topk: the workspace is {list(work.shape)}, expected at least {rows} rows of "
            f"{2 * words + block + 4} words; make it by workspace(rows, {columns}, {select}, ..)"
        )
    pdl = EARLY and early.available(scores.device)
    strides = (scores.stride(0), work.stride(0))
    kernels.pivot_kernel[(rows,)](
        *(scores, lengths, work, *strides, columns, words, select, PIVOT_SIGMAS),
        SAMPLES=SAMPLES,
        SLACK=SLACK,
        BLOCK=block,
        PDL=pdl,
        num_warps=PIVOT_WARPS,
    )
    kernels.mark_kernel[(rows, triton.cdiv(columns, SLICE))](
        *(scores, lengths, work, *strides, columns, words),
        WORDS=SLICE // 32,
        BLOCK=block,
        PDL=pdl,
        num_warps=MARK_WARPS,
        **early.options(pdl),
    )
    kernels.collect_kernel[(rows,)](
        *(scores, lengths, work, ids, *strides, ids.stride(0), columns, words, select),
        BLOCK=block,
        BLOCK_W=min(WORD_BLOCK, triton.next_power_of_2(words)),
        BLOCK_WALK=WALK_BLOCK,
        BLOCK_K=PAD_BLOCK,
        PDL=pdl,
        num_warps=max(COLLECT_WARPS, block // 2048),
        **early.options(pdl),
    )
