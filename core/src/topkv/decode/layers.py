"""The path of each layer, bound once, and the open forward with its rows and chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import define, field, frozen
from torch import Tensor

from topkv.decode.lanes import LaneBuffers
from topkv.decode.loads import Loads
from topkv.decode.selectors import Selector
from topkv.hooks.backend import Backend
from topkv.hooks.host_format import HostFormat
from topkv.hooks.kv_format import KVFormat
from topkv.hooks.transfer import Transfer
from topkv.types import LayerView


@define
class LayerPath:
    """Everything that one layer's decode calls, bound once when the coordinator is made.

    Attributes:
        view: the layer in stored units, as transfer and backend are called with it.
        algorithm, transfer, backend: of its group; no algorithm in a dense one.
        lanes: buffers of its group.
        format: how the keys and values of a token are stored.
        host: what host memory holds of them, to which they are rounded.
        selector: gives its selection; None in a dense layer.
        loads: plans and loads the units of its selection; of no use in a dense layer.
        k_slots, v_slots: ``[slots, heads_per_lane, unit, D]`` views that the page table indexes.
        singles: the same path for query 0, 1, .. of each row alone, with lanes and step tensors
            of its own; none where all queries of a row are served at once.
        prompt_buffer: its rows, see ``topkv.memory.prompt_buffer``.
    """

    view: LayerView
    algorithm: Any
    transfer: Transfer
    backend: Backend
    lanes: LaneBuffers
    format: KVFormat
    host: HostFormat
    selector: Selector | None
    k_slots: Tensor
    v_slots: Tensor
    prompt_buffer: Tensor
    singles: list[LayerPath] = field(factory=list)
    loads: Loads = field(init=False)

    def turns(self, forward: Forward) -> list[tuple[LayerPath, slice]]:
        """Paths that the decode rows of a forward take, one after the other, and the rows of the
        packed batch that each has."""
        rows, queries = forward.decoded, forward.queries
        if queries == 1 or not self.singles:
            return [(self, slice(0, rows))]
        paths = enumerate(self.singles[:queries])
        return [(path, slice(query, rows, queries)) for query, path in paths]


@frozen
class Chunk:
    """One prefill chunk of a forward; ``rows`` are its rows in the packed batch."""

    slot: int
    rows: slice

    @property
    def tokens(self) -> int:
        """Rows of the chunk, one a token."""
        return int(self.rows.stop - self.rows.start)


@define
class Forward:
    """A forward that is open: begun, and neither ended nor aborted.

    Attributes:
        rows: int64, as numpy indexes, ``[B]`` slots of the decode rows, -1 for padded ones.
        append: tokens that each of them appends; None where all that are not padded append Q.
        queries: Q, rows of the packed batch that each has.
        appended: int32 ``[B]`` tokens that each appends; 0 of padded ones.
        chunks: the prompt chunks, whose rows follow the decode rows.
        called: layers whose ``attention`` was called; a graph that is replayed calls none.
        attended: called layers that have run.
        ending: slots whose requests end with the forward.
        live: int64, slots of decode rows that are not padded.
        writers: int64, slot of each token that decode rows append.
        drafted: int64, how many tokens its row appends before each of these; 0 where Q is 1.
        decoded: rows of the packed batch that are decode rows, B * Q.
    """

    rows: np.ndarray
    append: Sequence[int] | None = None
    queries: int = 1
    chunks: list[Chunk] = field(factory=list)
    called: set[int] = field(factory=set)
    attended: set[int] = field(factory=set)
    ending: list[int] = field(factory=list)
    appended: np.ndarray = field(init=False)
    live: np.ndarray = field(init=False)
    writers: np.ndarray = field(init=False)
    drafted: np.ndarray | int = field(init=False, default=0)
    decoded: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        live = self.rows >= 0
        asked = self.queries if self.append is None else self.append
        self.appended = live * np.asarray(asked, dtype=np.int32)
        self.live, self.decoded = self.rows[live], len(self.rows) * self.queries
        self.writers = self.live if self.append is None else self.rows[self.appended > 0]
        if self.queries > 1:
            row, self.drafted = (np.arange(self.queries) < self.appended[:, None]).nonzero()
            self.writers = self.rows[row]

    def add_chunk(self, slot: int, tokens: int) -> None:
        """Put the rows of a chunk behind the rows so far."""
        self.chunks.append(Chunk(slot, slice(self.count, self.count + tokens)))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(chunk.tokens for chunk in self.chunks)

    @property
    def count(self) -> int:
        """Rows of the packed batch."""
        return self.decoded + self.prompt_tokens
