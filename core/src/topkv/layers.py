"""What a forward works on: the path of each layer, and the forward that is open."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import define, field, frozen
from torch import Tensor

from topkv.errors import RequestError
from topkv.hooks.backend import Backend
from topkv.hooks.transfer import Transfer
from topkv.kv.rows import RowFormat
from topkv.lanes import LaneBuffers
from topkv.selectors import Selector
from topkv.types import LayerView


@define
class LayerPath:
    """Everything that one layer's decode calls, bound once when the coordinator is made.

    Attributes:
        view: what transfer and backend see of the layer.
        algorithm, transfer, backend: of its group; no algorithm in a dense one.
        lanes: buffers of its group.
        format: how keys and values are stored.
        selector: where its selection comes from; None in a dense layer.
        k_slots, v_slots: ``[slots, heads_per_lane, unit, D]`` what the page table points into.
    """

    view: LayerView
    algorithm: Any
    transfer: Transfer
    backend: Backend
    lanes: LaneBuffers
    format: RowFormat
    selector: Selector | None
    k_slots: Tensor
    v_slots: Tensor


@frozen
class Chunk:
    """One prefill chunk of a forward; ``rows`` are its rows in the packed batch."""

    slot: int
    start: int
    rows: slice

    @property
    def tokens(self) -> int:
        """How many rows it has."""
        count: int = self.rows.stop - self.rows.start
        return count


@define
class Forward:
    """A forward that is open: begun, and neither ended nor aborted.

    Attributes:
        rows: int32 ``[B]`` slots of the decode rows, -1 for padded ones.
        appended: int32 ``[B]`` 1 where a row appends its token.
        chunks: the prompt chunks, whose rows follow the decode rows.
        attended: layers that have run, outside of graphs.
        ending: slots that are to be ended with it.
    """

    rows: np.ndarray
    appended: np.ndarray
    chunks: list[Chunk] = field(factory=list)
    attended: set[int] = field(factory=set)
    ending: list[int] = field(factory=list)

    def add_chunk(self, slot: int, start: int, tokens: int, row: int | None = None) -> None:
        """Put the rows of a chunk behind those that are there, or at a row."""
        first = self.count if row is None else row
        self.chunks.append(Chunk(slot, start, slice(first, first + tokens)))

    def check_places(self) -> None:
        """Refuse chunks over rows of others, and rows that nothing would write.

        Raises:
            RequestError: of a chunk that was put at a row.
        """
        places = [np.arange(chunk.rows.start, chunk.rows.stop) for chunk in self.chunks]
        rows = np.concatenate([np.flatnonzero(self.rows >= 0), *places])
        times = np.bincount(rows[rows >= 0], minlength=self.count)
        twice, never = np.flatnonzero(times > 1), np.flatnonzero(times == 0)
        never = never[never >= len(self.rows)]  # padded decode rows are written by the decode
        first = rows.min(initial=0)
        if first < 0 or len(twice) or len(never):
            raise RequestError(
                f"rows of chunks must be 0 or more, those of no other row and without gaps, got "
                f"{twice.tolist()} twice, {never.tolist()} of nothing, the first {first}; "
                "leave the row out to put a chunk behind the others"
            )

    @property
    def writers(self) -> np.ndarray:
        """Slots of the decode rows that append."""
        writers: np.ndarray = self.rows[self.appended == 1]
        return writers

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(chunk.tokens for chunk in self.chunks)

    @property
    def count(self) -> int:
        """Rows of the packed batch."""
        ends: list[int] = [len(self.rows), *(chunk.rows.stop for chunk in self.chunks)]
        return max(ends)
