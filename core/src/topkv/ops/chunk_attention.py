"""Attention of a prompt chunk in parts, block by block of what it sees, merged by LSE."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import torch
from attrs import frozen
from torch import Tensor

from topkv.hooks.backend import Backend

MASK_BYTES = 256 << 20
"""Most bytes of the masks of a block of prompt rows."""


@frozen
class Chosen:
    """Selection of a prompt chunk's rows, where they do not see everything.

    Attributes:
        ids: int32 ``[m, lane_heads, W]`` units, -1 anywhere.
        unit: tokens of a unit.
    """

    ids: Tensor
    unit: int

    def columns(self, rows: slice, lane: int, first: int, count: int) -> Tensor:
        """List which of ``count`` keys, from position ``first`` on, rows of a lane see: int32
        ``[rows, W * unit]`` columns of these keys, -1 in place of other tokens."""
        ids = self.ids[rows, lane, :, None] * self.unit
        within = torch.arange(self.unit, dtype=ids.dtype, device=ids.device) - first
        columns = (ids + within).flatten(1)  # negative where an id is -1
        return columns.masked_fill_((columns < 0) | (columns >= count), -1)


def kept(ids: Tensor, count: int) -> Tensor:
    """Mask of listed columns, bool ``[m, count]``, for a backend that reads one.

    Args:
        ids: int32 ``[m, W]``, -1 anywhere; as ``Backend.prefill_selected`` is given them.
        count: keys.
    """
    keep = torch.zeros((len(ids), count + 1), dtype=torch.bool, device=ids.device)
    place = torch.where(ids < 0, count, ids).long()
    return keep.scatter_(1, place, True)[:, :count].contiguous()


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
    start: int,
    blocks: Iterable[tuple[int, Tensor, Tensor]],
    out: Tensor,
    chosen: Chosen | None = None,
) -> Tensor:
    """Attend a chunk at ``start`` to what stands before it and, causally, to itself.

    Args:
        q: ``[m, H, D]``.
        blocks: position of the first token, keys and values ``[n, Hkv, D]``, one block behind the
            other; the last one ends with the chunk.
        out: ``[m, H, Dv]`` in the dtype of q, to be written.
        chosen: all that each query sees; everything if None.

    Returns:
        The fp32 ``[m, H]`` natural log-sum-exp.
    """
    result: Tensor | None = None
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    impl = "triton" if q.is_cuda else "reference"
    for first, k, v in blocks:
        whole = result is None and first + len(k) == start + len(q)
        part = out if whole else q.new_empty(out.shape, dtype=torch.float32)
        part_lse = lse if result is None else torch.empty_like(lse)
        if chosen is None:
            backend.prefill(q, k, v, start, first, part, part_lse)
        else:
            attend_selected(backend, q, k, v, start, first, chosen, part, part_lse)
        if result is None:
            result = part
        else:
            merge(result, lse, part, part_lse, impl=impl)
    if result is not None and result is not out:
        out.copy_(result)
    return lse


def attend_selected(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: int,
    first: int,
    chosen: Chosen,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Call ``prefill_selected`` for one lane of heads at a time, and for as many rows as a mask
    has room for: one of a whole prompt over itself would grow with the square of its length.

    Args:
        q: ``[m, H, D]`` of positions ``start ..``.
        k, v: ``[n, Hkv, D]`` of positions ``first ..``.
        chosen: all that each query sees.
        out: ``[m, H, Dv]``, fp32 or in the dtype of q.
        lse: fp32 ``[m, H]``.
    """
    lanes, width = chosen.ids.shape[1:]
    each = len(k) + 1 + 3 * 8 * width * chosen.unit  # a mask, and int64 places on the way to it
    block = max(1, MASK_BYTES // each)
    heads, keys = q.shape[1] // lanes, k.shape[1] // lanes
    for row, lane in product(range(0, len(q), block), range(lanes)):
        at, own = slice(row, row + block), slice(lane * heads, (lane + 1) * heads)
        of = slice(lane * keys, (lane + 1) * keys)
        ids = chosen.columns(at, lane, first, len(k))
        part_q, part_k, part_v = q[at, own], k[:, of], v[:, of]
        part, part_lse = out[at, own], lse[at, own].contiguous()
        backend.prefill_selected(part_q, part_k, part_v, start + row, first, ids, part, part_lse)
        lse[at, own] = part_lse


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Let a logit without a value take part in each softmax, in place; ``lse`` is used up.

    ``sum_s exp(l_s) v_s / (sum_s exp(l_s) + exp(sink)) = out * sigmoid(lse - sink)``.

    Args:
        out: ``[..., H, Dv]``.
        lse: fp32 ``[..., H]``.
        sinks: fp32 ``[H]``.
    """
    out.mul_(lse.sub_(sinks).sigmoid_().unsqueeze(-1))
