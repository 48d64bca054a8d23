"""Stored history of prompt chunks, fetched ahead of attention. Cold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from topkv.config import LoweredConfig
from topkv.decode.layers import Chunk, LayerPath
from topkv.decode.streams import URGENT, SideStream
from topkv.errors import undone_by
from topkv.prompts.history import Block

PLACES = 2
"""Blocks that are attended or on their way at once, each in a place of its own."""


@frozen
class Staged:
    """A block on its way to its place.

    Attributes:
        number: number of the block.
        rows: ``[planes, n, Hkv, D]`` as stored, and room for a chunk behind it.
        ready: event after which the rows are there; None on a CPU.
    """

    number: int
    rows: Tensor
    ready: torch.cuda.Event | None


class HistoryAhead:
    """Stored history of a forward's prompt chunks, fetched ahead on a stream of its own.

    All of it is stored when the forward begins, for a chunk adds nothing to its own history. So
    the blocks of all layers are one list, layer by layer, and in a layer chunk by chunk; while one
    is attended the next is fetched, of the next layer too. A place is reused once the attention
    over its block was queued; whoever asks for a block out of turn waits for its fetch.

    Memory is that of ``PLACES`` blocks and of a chunk behind each, from the beginning of a forward
    to its end.

    Args:
        config: blocks, dtype and device.
        paths: of all layers, in order.
    """

    def __init__(self, config: LoweredConfig, paths: Sequence[LayerPath]) -> None:
        self.config, self.paths = config, paths
        # Else the programs that are left of a long kernel would all start before a fetch.
        self._side = SideStream(config.device, URGENT)
        self._blocks: list[tuple[int, int, int]] = []  # slot, first and end of each in a layer
        self._room = 0
        self._places: list[Tensor] = []
        self._staged: list[Staged | None] = [None] * PLACES

    def begin(self, chunks: Sequence[Chunk], lengths: np.ndarray) -> None:
        """Start to fetch for a forward.

        Args:
            chunks: in the order in which each layer attends them.
            lengths: int32 ``[R]`` tokens that are stored of each request.
        """
        self.end()
        block = self.config.prefill_block_tokens
        self._blocks = [
            (chunk.slot, first, min(first + block, length))
            for chunk, length in ((each, int(lengths[each.slot])) for each in chunks)
            for first in range(0, length if chunk.tokens else 0, block)
        ]
        if not self._blocks:
            return
        longest = max(min(block, int(lengths[each.slot])) + each.tokens for each in chunks)
        self._room = -(-longest // 16) * 16  # planes begin on a multiple of 16 bytes
        size = self._room * max(map(token_bytes, self.paths))
        self._places = [
            torch.empty(size, dtype=torch.uint8, device=self.config.device) for _ in range(PLACES)
        ]
        with undone_by(self.end):
            for number in range(PLACES):
                self._fetch_ahead(number)

    def blocks(
        self, path: LayerPath, slot: int, start: int, k: Tensor, v: Tensor
    ) -> Iterator[Block]:
        """All that a chunk attends to in a layer: its history, and itself at the end of the last
        block. A block is valid until the next one is asked for.

        Args:
            start: position of the chunk.
            k, v: ``[m, Hkv, *]`` its rows, as stored.
        """
        layer, dtype = path.view.layer - self.paths[0].view.layer, self.config.model.dtype
        if not start:
            yield 0, *path.format.unpack(k, v, dtype)
        for at, (of, first, end) in enumerate(self._blocks):
            if of == slot:
                number = layer * len(self._blocks) + at
                staged = self._staged[number % PLACES]
                if staged is None or staged.number != number:
                    staged = self._fetch(number)
                self._side.join(staged.ready)
                rows, last = staged.rows, end - first
                if end == start:
                    for plane, own in zip(rows, (k, v), strict=False):
                        plane[last : last + len(own)].copy_(own)
                    last += len(k)
                yield first, *path.format.unpack(rows[0, :last], rows[-1, :last], dtype)
                self._fetch_ahead(number + PLACES)

    def end(self) -> None:
        """Let go of the memory, once copies that are under way to it have ended."""
        if self._places:
            self._side.join()
        self._blocks, self._places, self._staged = [], [], [None] * PLACES

    def _fetch_ahead(self, number: int) -> None:
        if number < len(self._blocks) * len(self.paths):
            self._fetch(number)

    def _fetch(self, number: int) -> Staged:
        layer, at = divmod(number, len(self._blocks))
        path, (slot, first, end) = self.paths[layer], self._blocks[at]
        group, place = path.view.group, number % PLACES
        self._staged[place] = None  # until it is true
        rows = self._places[place][: self._room * token_bytes(path)].view(group.dtype)
        rows = rows.view(group.planes, self._room, group.num_kv_heads, group.head_dim)
        k, v = rows[0, : end - first], rows[-1, : end - first]
        with self._side.behind():
            path.transfer.fetch(path.view, slot, first, k, v)
        staged = self._staged[place] = Staged(number, rows, self._side.mark())
        return staged


def token_bytes(path: LayerPath) -> int:
    """Bytes of a token in a layer, as the device has it."""
    group = path.view.group
    return group.entry_bytes * group.lane_heads // group.unit
