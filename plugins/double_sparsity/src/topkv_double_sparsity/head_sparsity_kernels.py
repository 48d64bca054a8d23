"""Flatness of lanes in Triton, beside ``head_sparsity.flatness``.

``entropy_kernel`` reads the labels of the sample once more, with the queries that
``sample_kernel`` has stored, and ``flat_kernel`` parts the lanes. Names and columns as in
``kernels``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from topkv.types import LayerView
from topkv_double_sparsity.launch import Launcher
from topkv_double_sparsity.products import by_head, column, exp2, products, stored_query
from topkv_double_sparsity.sample_kernels import sample_size, stride_of

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def entropy_kernel(
    p_query,
    p_total,
    p_peak,
    p_mass,
    p_moment,
    p_labels,
    p_meta,
    p_slots,
    p_lengths,
    p_pages,
    max_pages,
    blocks,
    scale,
    SAMPLE: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    WORDS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PARTS: tl.constexpr,
    FAST: tl.constexpr,
    FP32: tl.constexpr,
):
    """Program (row x bundle, block of the sample): maximum of the logits of each column, sum of
    ``w = 2 ** z``, z = logit - maximum, and sum of ``w * z``.
    """
    bundle = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = bundle // (KV_HEADS // HEADS)
    first = bundle % (KV_HEADS // HEADS) * HEADS
    slot = tl.load(p_slots + row).to(tl.int64)
    closed = tl.maximum(tl.load(p_lengths + row) - 1, 0)
    stride = stride_of(closed, SAMPLE, DOUBLINGS)
    size = sample_size(closed, stride)
    start = block * (TILES * TILE)
    if (slot < 0) | (start >= size):
        return
    BLOCK_C: tl.constexpr = BLOCK_H * BLOCK_G
    c = tl.arange(0, BLOCK_C)
    queries = stored_query(p_query, bundle, BLOCK_K, BLOCK_C, PARTS, FP32)
    total = tl.load(p_total + bundle * BLOCK_C + c)
    peak = tl.full([BLOCK_C], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_C], tl.float32)
    moment = tl.zeros([BLOCK_C], tl.float32)
    for tile in tl.range(0, tl.minimum(TILES, tl.cdiv(size - start, TILE)), num_stages=STAGES):
        t = (start + tile * TILE + tl.arange(0, TILE)) * stride + stride // 2
        in_t = t < closed
        page = tl.load(p_pages + slot * max_pages + t // PAGE, in_t, other=0)
        at = page.to(tl.int64) * PAGE + t % PAGE
        x = products(
            *(p_labels, p_meta, at, in_t, first, queries, total, scale, mass * 0),
            *(KV_HEADS, WORDS, HEADS, BLOCK_K, BLOCK_H, BLOCK_G, PARTS, False),
        )
        higher = tl.maximum(peak, tl.max(tl.where(in_t[:, None], x, float("-inf")), 0))
        shift = tl.where(mass > 0, peak - higher, 0.0)
        shrink = tl.exp2(shift)
        z = tl.where(in_t[:, None], x - higher[None, :], -1e30)
        weight = exp2(z, FAST)
        moment = shrink * (moment + shift * mass) + tl.sum(weight * z, 0)
        mass = mass * shrink + tl.sum(weight, 0)
        peak = higher
    out = (bundle * blocks + block) * BLOCK_C + c
    tl.store(p_peak + out, peak)
    tl.store(p_mass + out, mass)
    tl.store(p_moment + out, moment)


@triton.jit
def flat_kernel(
    p_peak,
    p_mass,
    p_moment,
    p_slots,
    p_lengths,
    p_closed,
    p_flat,
    blocks,
    select,
    threshold,
    BUNDLES: tl.constexpr,
    PER_HEAD: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SPAN: tl.constexpr,
    SAMPLE: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Program (row x bundle): tokens of flat lanes move from ``p_closed`` to ``p_flat``.

    Where all heads of a row are one lane, a program takes all ``BUNDLES`` of them.
    """
    BLOCK_C: tl.constexpr = BLOCK_H * BLOCK_G
    LANES: tl.constexpr = HEADS if PER_HEAD else 1
    BLOCK_L: tl.constexpr = BLOCK_H if PER_HEAD else 1
    ROW: tl.constexpr = KV_HEADS // (HEADS * BUNDLES)
    program = tl.program_id(0).to(tl.int64)
    row = program // ROW
    closed = tl.maximum(tl.load(p_lengths + row) - 1, 0)
    closed = tl.where(tl.load(p_slots + row) < 0, 0, closed)
    nth = tl.arange(0, BLOCK_L)
    lane = program * LANES + nth
    if closed <= select:
        tl.store(p_flat + lane, nth * 0, nth < LANES)
        return
    size = sample_size(closed, stride_of(closed, SAMPLE, DOUBLINGS))
    b = tl.arange(0, BLOCK_B)[:, None, None]
    p = tl.arange(0, BLOCK_P)[None, :, None]
    c = tl.arange(0, BLOCK_C)[None, None, :]
    at = ((program * BUNDLES + b) * blocks + p) * BLOCK_C + c
    inside = (b < BUNDLES) & (p < (size + SPAN - 1) // SPAN) & (at >= 0)
    peaks = tl.load(p_peak + at, inside, other=float("-inf"))
    peak = tl.max(peaks, 1)
    peak = tl.where(peak > float("-inf"), peak, 0.0)
    shift = tl.where(inside, peaks - peak[:, None, :], 0.0)
    grow = tl.exp2(shift)
    masses = tl.load(p_mass + at, inside, other=0.0)
    mass = tl.maximum(tl.sum(masses * grow, 1), 2.0**-100)
    moments = tl.load(p_moment + at, inside, other=0.0)
    moment = tl.sum(grow * (moments + shift * masses), 1)
    entropy = (tl.log2(mass) - moment / mass) * LN_2
    head, g = column(tl.arange(0, BLOCK_C), BLOCK_H, BLOCK_G)
    real = ((head < HEADS) & (g < GROUP))[None, :] & (tl.arange(0, BLOCK_B) < BUNDLES)[:, None]
    flatness = tl.sum(tl.where(real, entropy, 0.0), 0)
    flatness = by_head(flatness[None, :], BLOCK_H, BLOCK_G)
    flatness = tl.sum(tl.sum(flatness, 3), 1)
    flatness = tl.sum(tl.reshape(flatness, [BLOCK_L, BLOCK_H // BLOCK_L]), 1)
    flatness = flatness / (KV_HEADS // (ROW * LANES) * GROUP)
    flat = flatness > threshold * tl.log(tl.maximum(size, 2).to(tl.float32))
    tl.store(p_closed + lane, tl.where(flat, 0, closed), nth < LANES)
    tl.store(p_flat + lane, tl.where(flat, closed, 0), nth < LANES)


class FlatLanes:
    """The kernels of one group, and their workspaces.

    Args:
        launcher: of the group; its queries and constants are used.
        device: of both.
    """

    def __init__(self, launcher: Launcher, device: torch.device) -> None:
        self.launcher, self.blocks = launcher, launcher.sample_blocks
        shape = (len(launcher.total), self.blocks, launcher.columns)
        self.peak, self.mass, self.moment = torch.empty(
            (3, *shape), dtype=torch.float32, device=device
        )
        self.flat = torch.zeros(launcher.group.rows, dtype=torch.int32, device=device)
        sampling, scoring = launcher.sampling, launcher.scoring
        takes = (*entropy_kernel.arg_names, "num_warps")
        self.measuring = {name: sampling[name] for name in sampling if name in takes}
        self.parting = {name: scoring[name] for name in scoring if name in flat_kernel.arg_names}

    def take(self, layer: LayerView, closed: Tensor) -> Tensor:
        """Tokens of flat lanes, int32 ``[N]``; those lanes have none left in ``closed [N]``.

        Comes after ``Launcher.score`` of the same queries.
        """
        launcher, step, settings = self.launcher, layer.step, self.launcher.settings
        where = (*launcher.readable(layer), step.slots, step.lengths, step.page_table)
        work = (self.peak, self.mass, self.moment)
        bundles = step.batch * (launcher.group.num_kv_heads // launcher.bundle)
        entropy_kernel[(bundles, self.blocks)](
            *(launcher.query, launcher.total, *work, *where),
            *(step.page_table.stride(0), self.blocks, launcher.scale),
            **self.measuring,
        )
        flat_kernel[(bundles // self.parting["BUNDLES"],)](
            *(*work, step.slots, step.lengths, closed, self.flat),
            *(self.blocks, launcher.group.select, settings.flat),
            **self.parting,
        )
        return self.flat[: len(closed)]
