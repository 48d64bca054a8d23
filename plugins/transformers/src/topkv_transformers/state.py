"""State of a cache's rows: plain numbers, which its forwards read and write."""

from __future__ import annotations

import numpy as np

from topkv_transformers.stock import StockLayers
from topkv_transformers.watch import ModelState


class CacheState:
    """The rows of one cache. Columns are positions of the padded batch.

    Attributes:
        slots: the request slot of each row; empty before the first forward.
        seen: columns that have been appended, padding included.
        prompt: columns below which a forward is prefill, even if it is one token long.
        most: most columns of a forward behind the prompt that is a decode step: 1, but while
            drafted tokens are verified.
        padding: int64 ``[B]`` columns of left padding of each row, so far.
        stock: the layers that topkv leaves alone.
        fed: the state of the model that has made all columns; None if there are none, or if it
            has changed between them.
        known: int64 ``[B, n]`` the ids of the first n columns, padding included, where ids are all
            that these follow from.
    """

    def __init__(self, stock: StockLayers | None = None) -> None:
        self.slots: list[int] = []
        self.stock = stock or StockLayers()
        self.most = 1
        self.clear()

    def begin(self, slots: list[int]) -> None:
        """Give the rows their requests."""
        self.slots = slots
        self.padding = np.zeros(len(slots), dtype=np.int64)
        self.known = np.zeros((len(slots), 0), dtype=np.int64)

    def feed(self, model: ModelState) -> None:
        """Note that a model in this state is about to append columns."""
        self.fed = model if not self.seen or self.fed is model else None

    def keep(self, columns: int) -> None:
        """Keep the first ``columns`` columns alone."""
        self.seen, self.prompt = columns, min(self.prompt, columns)
        self.known = self.known[:, :columns]

    def clear(self) -> list[int]:
        """Forget the rows, and return their slots."""
        slots = self.slots
        self.begin([])
        self.seen = self.prompt = 0
        self.fed: ModelState | None = None
        self.stock.reset()
        return slots
