"""Exact top-k of long rows: a pivot from a sample, what is above it, the best among that.

Three kernels, the first and last with one program per row, the second with one per slice:

1. ``pivot_kernel`` draws a random sample of the row and takes a key that in all likelihood a few
   more than K elements reach: the pivot. It is a guess; nothing below trusts it.
2. ``mark_kernel`` reads the row once and writes two bits per element: above the pivot, equal to
   it. Index and key of the elements above go to a list, in which a slice takes a part as large
   as it needs, in the order in which slices come to it.
3. ``collect_kernel`` sees all slices of its row. With G above and E equal to the pivot:
   - K <= G: the K best are among the G. Read them in order of index and select.
   - G < K <= G + E: the pivot is the K-th key. The G and the first K - G of the E, in order of
     index, are the result and come from the bits; any number of ties costs no more than this.
   - G + E < K, or G exceeds the list: the guess was bad. Walk the row from memory.
   So the result is exact whatever the sample was; only the time depends on it.

The list holds a count of elements that only luck and the scores decide, but its size, all grids
and all blocks depend on shapes alone. The one counter, of places taken in the list, is set to 0
by the first kernel of every call; the order in which programs run decides where a part of the list
is, and nothing else.

Odds of the walk for a sample of independent draws: the number of sampled keys among the K best is
about Poisson with mean m = SAMPLES * K / length. The pivot's rank in the sample is m + 3.5 sqrt(m)
+ 4, and the list has room for 5 more deviations: some 1e-4 a row. Positions are drawn at
random within equal strata, so that periodic scores mislead it no more than others.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from topkv.ops import pdl, topk_kernels
from topkv_triton_topk import kernels

SAMPLES, FEWEST_SAMPLES = 4096, 1024
"""Elements of a row that its pivot is drawn from, most and fewest; powers of two."""

SURE = 64
"""Fewer than ``SAMPLES`` are drawn where that many are still among the K best."""

PIVOT_SIGMAS = 3.5
"""Distance of the pivot's rank in the sample from the expected one, on the safe side."""

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
"""True to use programmatic dependent launch where the device has it."""


def need(samples: int, length: int, select: int) -> float:
    """Room for the candidates of a row; more for a longer one."""
    mean = samples * select / length
    most = (mean + PIVOT_SIGMAS * math.sqrt(mean) + 4) * (1 + 1 / SLACK)
    return (most + ROOM_SIGMAS * math.sqrt(most)) * length / samples


def _block(samples: int, columns: int, select: int) -> int:
    room: int = triton.next_power_of_2(max(math.ceil(need(samples, columns, select)), select))
    return max(MIN_CANDIDATES, room)


def candidate_block(columns: int, select: int) -> int:
    """Room for the candidates of rows of up to N columns; at least ``select``."""
    return _block(SAMPLES, columns, select)


def block_of(columns: int, select: int) -> int | None:
    """``candidate_block``; None where the core's kernels select, see ``PivotTopK``."""
    if columns <= topk_kernels.MAX_BLOCK:
        return None
    block = candidate_block(columns, select)
    return block if block <= MAX_CANDIDATES else None


def samples_of(columns: int, select: int) -> int:
    """Number of samples: the fewest that make the pivot sure enough, and the block no larger."""
    count, block = SAMPLES, candidate_block(columns, select)
    while count > FEWEST_SAMPLES and count * select >= 2 * SURE * columns:
        if _block(count // 2, columns, select) > block:
            break
        count //= 2
    return count


def _words(columns: int) -> int:
    """Words of marks of a row, whole slices."""
    slices: int = triton.cdiv(columns, SLICE)
    return slices * (SLICE // 32)


def _width(columns: int, block: int) -> int:
    """int32 words of scratch of a row, a multiple of 16 bytes; see ``scratch``."""
    words = _words(columns)
    parts = triton.cdiv(2 * words // (SLICE // 32), 4) * 4
    width: int = 2 * words + 2 * block + 4 + parts
    return width


def scratch(rows: int, columns: int, block: int, device: torch.device) -> Tensor:
    """int32 ``[rows, words]``: marks above, marks equal, listed indices and keys, pivot and how
    many are listed in a block of four, then first place and size of the part of each slice.
    """
    return torch.empty((rows, _width(columns, block)), dtype=torch.int32, device=device)


def topk(scores: Tensor, lengths: Tensor, ids: Tensor, block: int, work: Tensor) -> None:
    """Launch the kernels, with room for ``block`` candidates from :func:`block_of`.

    ``work`` is a :func:`scratch` of at least these rows, columns and candidates.
    """
    rows, columns = scores.shape
    select, words = ids.shape[1], _words(columns)
    pairs = work.view(torch.int64)
    early = EARLY and pdl.available(scores.device)
    strides = (scores.stride(0), work.stride(0))
    kernels.pivot_kernel[(rows,)](
        *(scores, lengths, work, *strides, columns, words, select, PIVOT_SIGMAS),
        SAMPLES=samples_of(columns, select),
        SLACK=SLACK,
        BLOCK=block,
        PDL=early,
        num_warps=PIVOT_WARPS,
        **pdl.options(early),
    )
    kernels.mark_kernel[(rows, triton.cdiv(columns, SLICE))](
        *(scores, lengths, work, pairs, *strides, columns, words),
        WORDS=SLICE // 32,
        BLOCK=block,
        PDL=early,
        num_warps=MARK_WARPS,
        **pdl.options(early),
    )
    kernels.collect_kernel[(rows,)](
        *(scores, lengths, work, pairs, ids, *strides, ids.stride(0), columns, words, select),
        WORDS=SLICE // 32,
        LEVELS=(triton.cdiv(columns, SLICE) - 1).bit_length(),
        BLOCK=block,
        BLOCK_W=min(WORD_BLOCK, triton.next_power_of_2(words)),
        BLOCK_WALK=WALK_BLOCK,
        BLOCK_K=PAD_BLOCK,
        PDL=early,
        num_warps=max(COLLECT_WARPS, block // 2048),
        **pdl.options(early),
    )
