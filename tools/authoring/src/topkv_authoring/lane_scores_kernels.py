"""Kernel of ``HeadScores.lanes``, and the function with which kernels sum up blocks of scores.

Names: ``p_`` pointers.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fold(peak, mass, scores, inside):
    """Add a tile of scores to the maximum ``[G]`` and the exponential sum ``[G]`` of a block.

    These begin with -inf and 0. ``scores [U, G]`` count where ``inside [U]`` says so; one of the
    first tile has to.
    """
    scores = tl.where(inside[:, None], scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 0))
    mass = mass * tl.exp(peak - higher) + tl.sum(tl.exp(scores - higher[None, :]), 0)
    return higher, mass


@triton.jit
def tokens_before(p_lengths, p_appended, row, QUERIES: tl.constexpr):
    """Tokens of a row before those that it appends, or before its newest one."""
    new = 1
    if QUERIES > 1:
        new = tl.maximum(tl.load(p_appended + row), 1)
    return tl.maximum(tl.load(p_lengths + row) - new, 0)


@triton.jit
def _normalisers(
    p_peak,
    p_mass,
    head,
    in_h,
    used,
    blocks,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Maximum of each head's scores, and the log of the exponential sum below it."""
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    for start in range(0, used, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        at = head[:, None] * blocks + p[None, :]
        inside = in_h[:, None] & (p < used)[None, :]
        peaks = tl.load(p_peak + at, inside, other=float("-inf"))
        peaks = tl.where(in_h[:, None], peaks, 0.0)
        masses = tl.load(p_mass + at, inside, other=0.0)
        higher = tl.maximum(peak, tl.max(peaks, 1))
        total = total * tl.exp(peak - higher) + tl.sum(masses * tl.exp(peaks - higher[:, None]), 1)
        peak = higher
    return peak, tl.log(tl.where(in_h, total, 1.0))


@triton.jit
def lanes_kernel(
    p_raw,
    p_peak,
    p_mass,
    p_slots,
    p_lengths,
    p_appended,
    p_scores,
    p_closed,
    max_units,
    blocks,
    sinks,
    recent,
    LANE_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (lane, block of units): log of the sum of the softmaxes of ``HEADS`` query heads.

    One head gives its scores as they are. Forced units get +inf. With several QUERIES of GROUP
    heads for each kv-head, those that are padding do not count.
    """
    lane = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = lane // LANE_HEADS
    slot = tl.load(p_slots + row)
    new = 1
    if QUERIES > 1:
        new = tl.maximum(tl.load(p_appended + row), 1)
    closed = tl.maximum(tl.load(p_lengths + row) - new, 0) // UNIT
    closed = tl.where(slot < 0, 0, closed)
    if block == 0:
        tl.store(p_closed + lane, closed)
    if block * BLOCK_V >= closed:
        return
    h = tl.arange(0, BLOCK_H)
    in_h = h < HEADS
    if QUERIES > 1:
        in_h &= h // GROUP % QUERIES < new
    head = lane * HEADS + h
    v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    in_v = v < closed
    inside = in_h[:, None] & in_v[None, :]
    x = tl.load(p_raw + head[:, None] * max_units + v[None, :], inside, other=float("-inf"))
    if HEADS > 1:
        used = (closed + BLOCK_U - 1) // BLOCK_U
        peak, log = _normalisers(p_peak, p_mass, head, in_h, used, blocks, BLOCK_H, BLOCK_P)
        # The maximum first: near it the difference of two scores is exact.
        x = x - peak[:, None] - log[:, None]
    best = tl.max(x, 0)
    if HEADS > 1:
        shares = tl.exp(x - tl.where(in_v, best, 0.0)[None, :])
        best += tl.log(tl.where(in_v, tl.sum(shares, 0), 1.0))
    best = tl.where((v < sinks) | (v >= closed - recent), float("inf"), best)
    tl.store(p_scores + lane * max_units + v, best, in_v)
