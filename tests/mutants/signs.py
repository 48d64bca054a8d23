"""A selector by one bit an element, with kernels of its own, from which mutants are made.

A token keeps the sign of each element of its key and the key's norm. A query head scores it with
``norm * sum_i sign_i q_i``, and a lane takes the largest score of its query heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry
from topkv.hooks.algorithm import AlgorithmSpec, RepresentationSpec
from topkv.ops.topk import topk

BLOCK = 64
"""Tokens of a program of the score kernel."""


@triton.jit
def write_kernel(
    p_k,
    p_signs,
    p_norms,
    p_slots,
    p_places,
    p_written,
    p_pages,
    max_pages,
    s_row,
    s_head,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (row, kv-head): the key of a row to its token."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(p_slots + row).to(tl.int64)
    token = tl.load(p_places + row) - 1
    if (slot < 0) | (token < 0) | (tl.load(p_written + row) == 0):
        return
    page = tl.load(p_pages + slot * max_pages + token // PAGE).to(tl.int64)
    at = (page * PAGE + token % PAGE) * KV_HEADS + head
    d = tl.arange(0, BLOCK_D)
    k = tl.load(p_k + row * s_row + head * s_head + d, d < D, other=0.0).to(tl.float32)
    tl.store(p_signs + at * D + d, tl.where(k >= 0, 1, -1).to(tl.int8), d < D)
    norm = tl.sqrt_rn(tl.sum(k * k, 0))
    tl.store(p_norms + at, norm)


@triton.jit
def score_kernel(
    p_q,
    p_signs,
    p_norms,
    p_slots,
    p_lengths,
    p_pages,
    p_scores,
    max_pages,
    max_units,
    s_row,
    s_head,
    LANE_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (lane, block of tokens); HEADS are the kv-heads of a lane."""
    lane = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = lane // LANE_HEADS
    slot = tl.load(p_slots + row).to(tl.int64)
    closed = tl.maximum(tl.load(p_lengths + row) - 1, 0)
    if (slot < 0) | (block * BLOCK >= closed):
        return
    u = block * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    in_u = u < closed
    page = tl.load(p_pages + slot * max_pages + u // PAGE, in_u, other=0).to(tl.int64)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for h in range(HEADS):
        head = lane % LANE_HEADS * HEADS + h
        at = (page * PAGE + u % PAGE) * (LANE_HEADS * HEADS) + head
        inside = in_u[:, None] & (d < D)[None, :]
        signs = tl.load(p_signs + at[:, None] * D + d[None, :], inside, other=0).to(tl.float32)
        norm = tl.load(p_norms + at, in_u, other=0.0)
        for g in range(GROUP):
            p_head = p_q + row * s_row + (head * GROUP + g) * s_head
            q = tl.load(p_head + d, d < D, other=0.0).to(tl.float32)
            best = tl.maximum(best, norm * tl.sum(signs * q[None, :], 1))
    tl.store(p_scores + lane * max_units + u, best, in_u)


class Signs:
    """Selects single tokens by the signs of their keys."""

    impl = "reference"
    settle_whole = False
    prefix = "pages"

    def __init__(self, setup):
        self.model, self.group = setup.model, setup.group
        group = self.group
        if self.impl == "triton":
            self.work = setup.topk(group.max_lanes, group.max_units, group.select)
            # Full of the best score: one that no kernel writes is selected, whatever memory held.
            self.scores = torch.full(
                (group.max_lanes, group.max_units), torch.inf, device=setup.device
            )

    @hookimpl
    def spec(self):
        heads, dim = self.group.num_kv_heads, self.group.head_dim
        pools = (
            RepresentationSpec("signs", "token", (heads, dim), torch.int8),
            RepresentationSpec("norms", "token", (heads,), torch.float32),
        )
        return AlgorithmSpec(pools, settle_whole=self.settle_whole, prefix=self.prefix)

    @hookimpl
    def construct(self, layer, slot, start, k, v, q, lse):
        places = torch.arange(start + 1, start + 1 + len(k), dtype=torch.int32, device=k.device)
        ones = torch.ones_like(places)
        self._write(layer, slot * ones, places, ones, k)

    @hookimpl
    def update(self, layer, k, v):
        step = layer.step
        self._write(layer, step.slots, step.lengths, step.appended, k[:, 0])

    @hookimpl
    def retrieve_topk(self, layer, q, weights, out):
        q = q[:, 0]
        scores = (self._kernel_scores if self.impl == "triton" else self._scores)(layer, q)
        step = layer.step
        closed = (step.lengths - 1).clamp(min=0) * (step.slots >= 0)
        closed = closed.repeat_interleave(self.group.lane_heads).int()
        work = self.work if self.impl == "triton" else None
        topk(scores, closed, out.ids, impl=self.impl, work=work)
        return out

    def _write(self, layer, slots, places, written, k):
        """Write keys ``[n, Hkv, D]`` of ``slots`` to the tokens at lengths ``places``."""
        group, table = self.group, layer.step.page_table
        signs, norms = layer.pools["signs"], layer.pools["norms"]
        if self.impl == "triton":
            k = k if k.stride(-1) == 1 else k.contiguous()
            write_kernel[(len(k), group.num_kv_heads)](
                *(k, signs, norms, slots, places, written, table, table.stride(0)),
                *k.stride()[:2],
                **self._constants(),
                KV_HEADS=group.num_kv_heads,
            )
            return
        rows = (slots >= 0) & (places > 0) & (written != 0)
        tokens, k = places[rows].long() - 1, k[rows].float()
        page = table[slots[rows].long(), tokens // group.page_tokens].long()
        at = page * group.page_tokens + tokens % group.page_tokens
        signs[at] = torch.where(k >= 0, 1, -1).to(torch.int8)
        norms[at] = k.square().sum(-1).sqrt()

    def _scores(self, layer, q):
        """Scores of the reference, fp32 ``[N, U]``."""
        group, step = self.group, layer.step
        tokens = torch.arange(group.max_units, device=q.device)
        closed = (step.lengths - 1).clamp(min=0)[:, None]
        slots = step.slots.long().clamp(min=0)
        pages = step.page_table[slots][:, tokens // group.page_tokens].long()
        at = pages * group.page_tokens + tokens % group.page_tokens
        at = torch.where(tokens < closed, at, 0)
        signs = layer.pools["signs"][at].float().unflatten(2, (group.lane_heads, -1))
        norms = layer.pools["norms"][at].unflatten(2, (group.lane_heads, -1))
        heads = q.float().unflatten(1, (group.lane_heads, group.heads_per_lane, -1))
        products = torch.einsum("bnlhd,blhgd->blnhg", signs, heads)
        scores = products * norms.transpose(1, 2)[..., None]
        return scores.amax((3, 4)).flatten(0, 1)

    def _kernel_scores(self, layer, q):
        group, step = self.group, layer.step
        lanes = step.batch * group.lane_heads
        blocks = triton.cdiv(group.max_units, BLOCK)
        q = q if q.stride(-1) == 1 else q.contiguous()
        score_kernel[(lanes, blocks)](
            *(q, layer.pools["signs"], layer.pools["norms"], step.slots, step.lengths),
            *(step.page_table, self.scores, step.page_table.stride(0), group.max_units),
            *q.stride()[:2],
            **self._constants(),
            LANE_HEADS=group.lane_heads,
            HEADS=group.heads_per_lane,
            GROUP=self.model.group_size,
            BLOCK=BLOCK,
        )
        return self.scores[:lanes]

    def _constants(self):
        dim = self.group.head_dim
        return {"PAGE": self.group.page_tokens, "D": dim, "BLOCK_D": triton.next_power_of_2(dim)}


class SignsTriton(Signs):
    """``Signs`` by kernels."""

    impl = "triton"


SIGNS = PluginEntry(
    "signs",
    "algorithm",
    {"reference": f"{__name__}:Signs", "triton": f"{__name__}:SignsTriton"},
    capabilities=Capabilities(
        units=(1, 1),
        traits=(
            "attends",
            "nested",
            "scale_free",
            "exact_update",
            "low_ties",
            "head_equivariant",
            "incremental",
            "value_free",
        ),
    ),
)
