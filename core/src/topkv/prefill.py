"""Dense prefill: a chunk over itself and over history streamed block by block, merged by LSE."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from topkv.types import LayerView


def history_blocks(
    transfer: Any,
    layer: LayerView,
    slot: int,
    start: int,
    end: int,
    block: int,
    device: torch.device,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Stream positions ``start .. end`` from their pages, ``block`` tokens at a time.

    Args:
        start: on a unit boundary.
        block: a multiple of the page.

    Yields:
        ``(position, k, v)`` with ``[n, Hkv, D]`` tensors that the caller may keep.
    """
    group = layer.group
    for first in range(start, end, block):
        shape = (min(block, end - first), group.num_kv_heads, group.head_dim)
        k = torch.empty(shape, dtype=group.dtype, device=device)
        v = torch.empty_like(k)
        transfer.fetch(layer, slot, first, k, v)
        yield first, k, v


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Fold a partial result into ``out`` and ``lse`` in place.

    ``softmax`` over two disjoint sets of keys is the average of the two results, weighted by
    ``exp(lse)`` (FlashAttention-2, section 3.1). Fully masked parts have ``lse`` -inf.

    Args:
        out, part: fp32 ``[m, H, D]``.
        lse, part_lse: fp32 ``[m, H]``.
    """
    both = torch.logaddexp(lse, part_lse)
    floor = both.masked_fill(both == -torch.inf, 0.0)
    out.mul_(torch.exp(lse - floor).unsqueeze(-1))
    out.addcmul_(part, torch.exp(part_lse - floor).unsqueeze(-1))
    lse.copy_(both)


def chunk_attention(
    backend: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: int,
    history: Iterator[tuple[int, Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Attend a chunk at ``start`` causally to itself and fully to its history.

    Args:
        q: ``[m, H, D]``.
        k, v: ``[m, Hkv, D]``.
        history: blocks of the positions before ``start``.

    Returns:
        fp32 ``[m, H, D]`` and the fp32 ``[m, H]`` natural log-sum-exp.
    """
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    backend.prefill(q, k, v, start, start, out, lse)
    for first, past_k, past_v in history:
        part, part_lse = torch.empty_like(out), torch.empty_like(lse)
        backend.prefill(q, past_k, past_v, start, first, part, part_lse)
        merge(out, lse, part, part_lse)
    return out, lse


def open_keys(layer: LayerView, slot: int, start: int) -> Tensor:
    """Keys ``[start % unit, Hkv, D]`` that the open unit holds before a chunk at ``start``.

    A copy: a chunk longer than the ring overwrites the place that they are read from.
    """
    group = layer.group
    unit, filled = divmod(start, group.unit)
    ring = layer.ring_k[slot, :, unit % group.ring_slots, :, :filled]
    return ring.flatten(0, 1).transpose(0, 1).clone()
