"""Radix select in Triton: one program per row, or per chunk of a long row.

A score becomes a 32-bit key of the same order. The K-th largest key is found bit by bit, from
the top, by counting; wider digits need fewer rounds but more instructions, and measured slower.
One prefix sum then gives every selected element its place, so that ids come out in ascending
order and of the keys that equal the K-th those of lowest index are taken.

A row that fits one block stays in registers. A longer row is cut into chunks; the K best of each
chunk contain the K best of the row, and they are selected again until one block holds them. Only
where K is so large that chunks would hardly shrink does one program walk the row from memory.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 16384
"""Elements that one program holds in registers."""

PAD_BLOCK = 512
"""Ids per iteration where a program writes padding."""

STREAM_BLOCK = 8192
"""Elements per iteration where a program walks its row."""


@triton.jit
def _keys(score, valid):
    """uint32 of the order of the scores; 0, which no score maps to, where not valid.

    Integer arithmetic alone: float comparisons may flush subnormals to zero.
    """
    bits = score.to(tl.uint32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0xFF800000, bits)
    bits = tl.where(bits == 0x80000000, 0, bits)
    keys = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(valid, keys, 0)


@triton.jit
def _decide(count, prefix, bit, want, reached, above):
    """One bit of the K-th key, from ``count`` keys that reach ``prefix + bit``.

    ``reached`` counts the keys that reach the prefix, ``above`` those that reach the lowest
    threshold that turned out too high: after the last bit, those above the K-th key.
    """
    enough = count >= want
    reached = tl.where(enough, count, reached)
    above = tl.where(enough, above, count)
    return tl.where(enough, prefix + bit, prefix), reached, above


@triton.jit
def _threshold(prefix, want, reached, above):
    """Keys above the threshold are taken, and as many equal ones as the budget says."""
    exact = reached == want
    return tl.where(exact, prefix - 1, prefix), tl.where(exact, 0, want - above)


@triton.jit
def _place(keys, threshold, budget, above_before, equal_before):
    """Which elements are taken and where they go, given what earlier elements took."""
    above = keys > threshold
    equal = keys == threshold
    # Two counts share one scan: a block has fewer than 2**15 elements.
    pair = above.to(tl.int32) + tl.where(equal, 1 << 16, 0)
    before = tl.cumsum(pair, 0) - pair
    above_rank = above_before + (before & 0xFFFF)
    equal_rank = equal_before + (before >> 16)
    taken = above | (equal & (equal_rank < budget))
    return taken, above_rank + tl.minimum(equal_rank, budget)


@triton.jit(do_not_specialize=["columns", "width", "K"])
def select_kernel(
    p_scores,
    p_lengths,
    p_candidates,
    p_ids,
    s_scores,
    s_candidates,
    s_ids,
    columns,
    width,
    K,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Select among ``BLOCK`` columns, or among as many listed candidates (-1 is none).

    Chunk c of a row writes ``ids[n, c * K : (c + 1) * K]``; ``width`` is the number of
    candidates of a row where they are listed.
    """
    n = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    offset = chunk * BLOCK + tl.arange(0, BLOCK)
    p_scores += n * s_scores
    p_ids += n * s_ids + chunk.to(tl.int64) * K
    pad = tl.arange(0, BLOCK_K)
    if LISTED:
        index = tl.load(p_candidates + n * s_candidates + offset, offset < width, other=-1)
        valid = index >= 0
        count = tl.sum(valid.to(tl.int32), 0)
        score = tl.load(p_scores + index, valid, other=0.0)
    else:
        # The whole row, garbage included: its load need not wait for the length.
        score = tl.load(p_scores + offset, offset < columns, other=0.0)
        length = tl.minimum(tl.load(p_lengths + n), columns)
        count = tl.minimum(tl.maximum(length - chunk * BLOCK, 0), BLOCK)
        if count <= K:
            for first in range(0, K, BLOCK_K):
                at = first + pad
                tl.store(p_ids + at, tl.where(at < count, chunk * BLOCK + at, -1), at < K)
            return
        index = offset
        valid = offset < length

    keys = _keys(score, valid)
    want = tl.minimum(count, K)
    prefix = tl.full((), 0, tl.uint32)
    bit = tl.full((), 1 << 31, tl.uint32)
    reached = tl.full((), BLOCK, tl.int32)
    above = tl.full((), 0, tl.int32)
    # Stops early at a threshold that exactly ``want`` keys reach.
    while (bit > 0) & (reached != want):
        count = tl.sum((keys >= prefix + bit).to(tl.int32), 0)
        prefix, reached, above = _decide(count, prefix, bit, want, reached, above)
        bit = bit >> 1
    threshold, budget = _threshold(prefix, want, reached, above)
    taken, place = _place(keys, threshold, budget, 0, 0)
    tl.store(p_ids + place, index, taken & valid)
    if LISTED:
        for first in range(0, K, BLOCK_K):
            at = first + pad
            tl.store(p_ids + at, -1, (at >= want) & (at < K))


@triton.jit(do_not_specialize=["columns", "K"])
def stream_kernel(
    p_scores,
    p_lengths,
    p_ids,
    s_scores,
    s_ids,
    columns,
    K,
    BLOCK: tl.constexpr,
):
    """The same selection with the row read once per bit; for K beyond half a block."""
    n = tl.program_id(0).to(tl.int64)
    p_scores += n * s_scores
    p_ids += n * s_ids
    block = tl.arange(0, BLOCK)
    length = tl.minimum(tl.maximum(tl.load(p_lengths + n), 0), columns)
    want = tl.minimum(length, K)
    if length <= K:
        for first in range(0, K, BLOCK):
            at = first + block
            tl.store(p_ids + at, tl.where(at < want, at, -1), at < K)
        return

    prefix = tl.full((), 0, tl.uint32)
    bit = tl.full((), 1 << 31, tl.uint32)
    reached = tl.full((), 0, tl.int32) + length
    above = tl.full((), 0, tl.int32)
    while (bit > 0) & (reached != want):
        count = tl.full((), 0, tl.int32)
        for first in range(0, length, BLOCK):
            valid = first + block < length
            score = tl.load(p_scores + first + block, valid, other=0.0)
            count += tl.sum((_keys(score, valid) >= prefix + bit).to(tl.int32), 0)
        prefix, reached, above = _decide(count, prefix, bit, want, reached, above)
        bit = bit >> 1
    threshold, budget = _threshold(prefix, want, reached, above)
    above = tl.full((), 0, tl.int32)
    equal = tl.full((), 0, tl.int32)
    for first in range(0, length, BLOCK):
        valid = first + block < length
        keys = _keys(tl.load(p_scores + first + block, valid, other=0.0), valid)
        taken, place = _place(keys, threshold, budget, above, equal)
        tl.store(p_ids + place, first + block, taken & valid)
        above += tl.sum((keys > threshold).to(tl.int32), 0)
        equal += tl.sum((keys == threshold).to(tl.int32), 0)


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 8)


def topk(scores: Tensor, lengths: Tensor, ids: Tensor) -> None:
    """Launches; the contract stands in :func:`topkv.ops.topk.topk`."""
    rows, columns = scores.shape
    select = ids.shape[1]
    if columns > MAX_BLOCK and 2 * select > MAX_BLOCK:
        stream_kernel[(rows,)](
            *(scores, lengths, ids, scores.stride(0), ids.stride(0), columns, select),
            BLOCK=STREAM_BLOCK,
            num_warps=16,
        )
        return
    candidates, width = ids, columns
    while True:
        listed = candidates is not ids
        block = max(16, min(MAX_BLOCK, triton.next_power_of_2(width)))
        chunks = triton.cdiv(width, block)
        target = ids
        if chunks > 1:
            target = torch.empty((rows, chunks * select), dtype=torch.int32, device=ids.device)
        select_kernel[(rows, chunks)](
            *(scores, lengths, candidates, target),
            *(scores.stride(0), candidates.stride(0), target.stride(0), columns, width, select),
            BLOCK=block,
            BLOCK_K=min(block, PAD_BLOCK),
            LISTED=listed,
            num_warps=_warps(block),
        )
        if chunks == 1:
            return
        candidates, width = target, chunks * select
