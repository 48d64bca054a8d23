"""Keys and values that a request has stored, read back from its pages and its ring. Cold."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from attrs import frozen
from torch import Tensor

from topkv.decode.layers import LayerPath

Block = tuple[int, Tensor, Tensor]
"""Position of the first token, keys and values ``[n, Hkv, D]``."""


@frozen
class StoredHistory:
    """Positions ``start .. end`` of a request in one layer, streamed from their pages.

    Each iteration streams them anew, block by block, each into memory of its own that the caller
    may keep. This is what ``settle`` is given (``topkv.hooks.algorithm.History``).

    Args:
        path: the layer.
        slot: the request.
        start, end: positions.
        block: tokens at a time, a multiple of the page.
        dtype: of the model, which packed rows are decoded to.
        device: where the model decodes.
    """

    path: LayerPath
    slot: int
    start: int
    end: int
    block: int
    dtype: torch.dtype
    device: torch.device

    def __iter__(self) -> Iterator[Block]:
        path, group = self.path, self.path.view.group
        # Transfers fetch from a boundary of stored units on.
        for first in range(self.start - self.start % group.unit, self.end, self.block):
            shape = (min(self.block, self.end - first), group.num_kv_heads, group.head_dim)
            k = torch.empty(shape, dtype=group.dtype, device=self.device)
            v = torch.empty_like(k) if group.planes == 2 else k
            path.transfer.fetch(path.view, self.slot, first, k, v)
            k, v = path.format.unpack(k, v, self.dtype)
            cut = max(0, self.start - first)
            yield first + cut, k[cut:], v[cut:]


def open_unit(
    path: LayerPath, unit: int, slot: int, start: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values ``[start % unit, Hkv, D]`` of the open unit before a chunk at ``start``.

    A copy: a chunk longer than the ring overwrites the ring slots that hold these rows.

    Args:
        unit: of the algorithm; 1 where a stage regrains, and none is open then.
    """
    ring_unit, filled = divmod(start, unit)
    at = ring_unit % path.view.group.ring_slots
    k, v = (
        ring[slot, :, at, :, :filled].flatten(0, 1).transpose(0, 1).clone()
        for ring in (path.view.ring_k, path.view.ring_v)
    )
    return path.format.unpack(k, v, dtype)
