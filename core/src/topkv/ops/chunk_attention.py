"""Attention of a prompt chunk in parts: over itself and over blocks of history, merged by LSE."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor

from topkv.hooks.backend import Backend

MASK_BYTES = 256 << 20
"""Most bytes of the masks of a block of prompt rows."""


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, *, impl: str) -> None:
    """Fold a partial result into ``out`` and ``lse`` in place.

    ``softmax`` over two disjoint sets of keys is the average of the two results, weighted by
    ``exp(lse)`` (FlashAttention-2, section 3.1). Fully masked parts have ``lse`` -inf.

    Args:
        out, part: fp32 ``[m, H, D]``.
        lse, part_lse: fp32 ``[m, H]``.
        impl: ``"reference"``, or ``"triton"`` of contiguous tensors.
    """
    if impl == "triton":
        from topkv.ops import chunk_attention_kernels

        chunk_attention_kernels.merge(out, lse, part, part_lse)
        return
    most = torch.maximum(lse, part_lse)
    floor = most.masked_fill(most == -torch.inf, 0.0)
    weight, part_weight = torch.exp(lse - floor), torch.exp(part_lse - floor)
    total = weight + part_weight
    share = total.masked_fill(total == 0, 1.0)
    out.mul_((weight / share).unsqueeze(-1))
    out.addcmul_(part, (part_weight / share).unsqueeze(-1))
    lse.copy_(floor + total.log())


def chunk_attention(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: int,
    history: Iterable[tuple[int, Tensor, Tensor]],
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend a chunk at ``start`` causally to itself and fully to its history.

    Args:
        q: ``[m, H, D]``.
        k, v: ``[m, Hkv, D]``.
        history: blocks of the positions before ``start``.
        ids: int32 ``[m, K]`` all that each query sees; everything if None.

    Returns:
        fp32 ``[m, H, Dv]`` and the fp32 ``[m, H]`` natural log-sum-exp.
    """
    shape = (*q.shape[:2], v.shape[-1])
    out = torch.empty(shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    impl = "triton" if q.is_cuda else "reference"
    for first, part_k, part_v in chain([(start, k, v)], history):
        chunk = first == start
        part, part_lse = (out, lse) if chunk else (torch.empty_like(out), torch.empty_like(lse))
        if ids is None:
            backend.prefill(q, part_k, part_v, start, first, part, part_lse)
        else:
            attend_selected(backend, q, part_k, part_v, start, first, ids, part, part_lse)
        if not chunk:
            merge(out, lse, part, part_lse, impl=impl)
    return out, lse


def attend_selected(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: int,
    first: int,
    ids: Tensor,
    out: Tensor,
    lse: Tensor,
) -> None:
    """``prefill_selected`` of as many rows at a time as their masks have room for.

    A mask of a whole prompt over itself would grow with the square of its length.

    Args:
        q: ``[m, H, D]`` of positions ``start ..``.
        k, v: ``[n, Hkv, D]`` of positions ``first ..``.
        ids: int32 ``[m, K]`` all that each query sees.
        out: fp32 ``[m, H, Dv]``.
        lse: fp32 ``[m, H]``.
    """
    each = len(k) + 1 + 3 * 8 * ids.shape[1]  # a mask, and int64 places on the way to it
    block = max(1, MASK_BYTES // each)
    for row in range(0, len(q), block):
        at = slice(row, row + block)
        keep = selected(ids[at], first, len(k))
        backend.prefill_selected(q[at], k, v, start + row, first, keep, out[at], lse[at])


def selected(ids: Tensor, first: int, count: int) -> Tensor:
    """bool ``[m, count]``: which of the positions ``first ..`` are among the ids ``[m, K]``."""
    place = ids.long() - first
    place = torch.where((place >= 0) & (place < count) & (ids >= 0), place, count)
    keep = torch.zeros((ids.shape[0], count + 1), dtype=torch.bool, device=ids.device)
    return keep.scatter_(1, place, True)[:, :count].contiguous()


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Let a logit without a value take part in each softmax, in place; ``lse`` is used up.

    ``sum_s exp(l_s) v_s / (sum_s exp(l_s) + exp(sink)) = out * sigmoid(lse - sink)``.

    Args:
        out: ``[..., H, Dv]``.
        lse: fp32 ``[..., H]``.
        sinks: fp32 ``[H]``.
    """
    out.mul_(lse.sub_(sinks).sigmoid_().unsqueeze(-1))
