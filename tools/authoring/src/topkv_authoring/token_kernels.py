"""Kernels around a device function that represents tokens, with page look-up and masks once.

``units.KeptOfTokens`` launches them. An author writes one function, beside its torch:

    represent(p_key, tensors, at, slot, head, valid, OPTIONS, D)
        stores what is kept of tokens: ``p_key [ROWS]`` are pointers to the D adjacent elements of
        their keys, ``at [ROWS]`` their rows of the pools of grain ``"token"``, heads of tokens
        counted, ``slot [ROWS]`` their requests, ``head`` the kv-head of the program. Nothing is
        read or written where ``valid [ROWS]`` is False.

``tensors`` is the tuple of pointers that the class gives. Names: ``p_`` pointers, ``s_`` strides
in elements. Pools are addressed by host id in 64 bit.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["slot", "start", "tokens"], do_not_specialize_on_alignment=["p_pages"]
)
def construct_tokens_kernel(
    p_k,
    tensors,
    p_pages,
    slot,
    start,
    tokens,
    s_token,
    s_head,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    REPRESENT: tl.constexpr,
    OPTIONS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Represent a chunk. Program (ROWS tokens, kv-head); ``p_pages``: page row of the request."""
    nth = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    valid = nth < tokens
    token = start + nth
    page = tl.load(p_pages + token // PAGE, valid, other=0).to(tl.int64)
    at = (page * PAGE + token % PAGE) * KV_HEADS + head
    slots = tl.zeros_like(nth) + slot
    REPRESENT(p_k + nth * s_token + head * s_head, tensors, at, slots, head, valid, OPTIONS, D)


@triton.jit(do_not_specialize=["count"])
def update_tokens_kernel(
    p_k,
    tensors,
    p_slots,
    p_lengths,
    p_appended,
    p_pages,
    count,
    max_pages,
    s_row,
    s_token,
    s_head,
    QUERIES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    REPRESENT: tl.constexpr,
    OPTIONS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Represent the tokens that rows appended. Program (ROWS of ``count`` tokens, kv-head).

    A row has QUERIES tokens, ``s_token`` apart; those that it did not append are padding.
    """
    nth = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    inside = nth < count
    row = nth // QUERIES
    slot = tl.load(p_slots + row, inside, other=-1).to(tl.int64)
    token = tl.load(p_lengths + row, inside, other=0) - 1
    appended = tl.load(p_appended + row, inside, other=0)
    valid = (slot >= 0) & (token >= 0) & (appended != 0)
    p_key = p_k + row * s_row + head * s_head
    if QUERIES > 1:
        query = nth % QUERIES
        token += 1 + query - appended
        valid &= query < appended
        p_key += query * s_token
    page = tl.load(p_pages + slot * max_pages + token // PAGE, valid, other=0).to(tl.int64)
    at = (page * PAGE + token % PAGE) * KV_HEADS + head
    REPRESENT(p_key, tensors, at, slot, head, valid, OPTIONS, D)
