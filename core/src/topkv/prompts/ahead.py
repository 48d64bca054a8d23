"""Stored history of prompt chunks, fetched ahead of attention. Cold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from attrs import frozen
from torch import Tensor

from topkv.config import LoweredConfig
from topkv.decode.layers import Chunk, LayerPath
from topkv.decode.streams import URGENT, SideStream
from topkv.errors import undone_by
from topkv.memory.prompt_buffer import token_bytes, token_rows
from topkv.prompts.history import Block
from topkv.requests.requests import Requests

PLACES = 2
"""Blocks that are attended or on their way at once, each in a place of its own."""

Staged = tuple[int, Tensor, torch.cuda.Event | None]
"""A block on its way to its place: number, rows ``[planes, n, Hkv, D]`` as stored, and behind them
room for a chunk, and the event after which they are there; None on a CPU."""


@frozen
class Span:
    """A block of a request's history, and its chunk behind the last one.

    Attributes:
        slot: of the request.
        first, end: positions of the history.
        rows: tokens with the chunk, if it is behind.
        held: first position that has to be fetched.
        buffered: True if it is in the prompt buffer, where it stays.
    """

    slot: int
    first: int
    end: int
    rows: int
    held: int
    buffered: bool


class HistoryAhead:
    """Stored history of a forward's prompt chunks, fetched ahead on a stream of its own.

    All of it is stored when the forward begins, for a chunk adds nothing to its own history. So
    the blocks of all layers are one list, layer by layer, and in a layer chunk by chunk; while one
    is attended the next is fetched, of the next layer too. A place is reused once the attention
    over its block was queued; whoever asks for a block out of turn waits for its fetch.

    One request at a time has the prompt buffer, where its first tokens stay from forward to
    forward; one that comes without it takes it over. Blocks are the same with and without it.
    Other memory is that of ``PLACES`` blocks and of a chunk behind each, from the beginning of a
    forward to its end.

    Args:
        config: blocks, dtype and device.
        requests: lengths, and what the prompt buffer has of each.
        paths: of all layers, in order.
    """

    def __init__(self, config: LoweredConfig, requests: Requests, paths: list[LayerPath]) -> None:
        self.config, self.requests, self.paths = config, requests, paths
        # Else the programs that are left of a long kernel would all start before a fetch.
        self._side = SideStream(config.device, URGENT)
        self._owner = -1  # slot of the request that has the prompt buffer
        self._attended: set[int] = set()  # layers that have run over what it has
        self._spans: list[Span] = []  # of each layer
        self._places: list[Tensor] = []
        self._staged: list[Staged | None] = [None] * PLACES

    def begin(self, chunks: Sequence[Chunk]) -> None:
        """Start to fetch for a forward.

        Args:
            chunks: in the order in which each layer attends them.
        """
        self.end()
        live = [chunk for chunk in chunks if chunk.tokens]
        if live and self._owner not in [chunk.slot for chunk in live]:
            self._hand_over(live[-1].slot)  # engines go on with the last one
        self._spans = [span for chunk in live for span in self._spans_of(chunk)]
        longest = max((span.rows for span in self._spans if not span.buffered), default=0)
        self._room = -(-longest // 16) * 16  # planes begin on a multiple of 16 bytes
        size = self._room * max(token_bytes(path.view.group) for path in self.paths)
        self._places = [
            torch.empty(size, dtype=torch.uint8, device=self.config.device) for _ in range(PLACES)
        ]
        with undone_by(self.end):
            for number in range(PLACES):
                self._fetch_ahead(number)

    def _hand_over(self, slot: int) -> None:
        """Give the prompt buffer to a request, which has nothing in it yet."""
        self._owner, self.requests.buffered[slot] = slot, 0

    def _spans_of(self, chunk: Chunk) -> Iterator[Span]:
        """Cut the history of a chunk into blocks: one, of no tokens, for a first chunk that the
        prompt buffer is to keep, and none for another first one."""
        slot, block = chunk.slot, self.config.prefill_block_tokens
        length, held = (int(each[slot]) for each in (self.requests.length, self.requests.buffered))
        room = self.paths[0].prompt_buffer.shape[1] if slot == self._owner else 0
        for first in range(0, max(length, 1), block):
            end = min(first + block, length)
            rows = end - first + chunk.tokens * (end == length)
            buffered = first + rows <= room
            if length or buffered:
                since = max(first, min(held, end)) if buffered else first
                yield Span(slot, first, end, rows, since, buffered)

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
        spans = [(at, span) for at, span in enumerate(self._spans) if span.slot == slot]
        if not spans:
            yield 0, *path.format.unpack(k, v, dtype)
        for at, span in spans:
            number = layer * len(self._spans) + at
            staged = self._staged[number % PLACES]
            if staged is None or staged[0] != number:
                staged = self._fetch(number)
            _, rows, ready = staged
            self._side.join(ready)
            last = span.end - span.first
            if span.end == start:
                for plane, own in zip(rows, (k, v), strict=False):
                    plane[last : last + len(own)].copy_(own)
                last += len(k)
            yield span.first, *path.format.unpack(rows[0, :last], rows[-1, :last], dtype)
            self._fetch_ahead(number + PLACES)
        if slot == self._owner:
            self._attended.add(layer)

    def end(self) -> None:
        """Let go of the memory, once copies to it have ended, and count what the prompt buffer has
        if all layers have attended to it."""
        if self._spans:
            self._side.join()
        if len(self._attended) == len(self.paths):
            kept = (span.first + span.rows for span in self._spans if span.buffered)
            self.requests.buffered[self._owner] = max(kept, default=0)
        self._attended.clear()
        self._spans, self._places, self._staged = [], [], [None] * PLACES

    def _fetch_ahead(self, number: int) -> None:
        if number < len(self._spans) * len(self.paths):
            self._fetch(number)

    def _fetch(self, number: int) -> Staged:
        layer, at = divmod(number, len(self._spans))
        path, span = self.paths[layer], self._spans[at]
        group, place = path.view.group, number % PLACES
        self._staged[place] = None  # until it is true
        if span.buffered:
            rows = path.prompt_buffer[:, span.first :]
        else:
            rows = token_rows(self._places[place][: self._room * token_bytes(group)], group)
        start = span.held - span.held % group.unit
        if start < span.end:
            k, v = (rows[plane, start - span.first : span.end - span.first] for plane in (0, -1))
            with self._side.behind():
                path.transfer.fetch(path.view, span.slot, start, k, v)
        staged = self._staged[place] = number, rows, self._side.mark()
        return staged
