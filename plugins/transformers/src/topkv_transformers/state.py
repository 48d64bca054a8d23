"""What a cache knows of its rows: plain numbers, which its forwards read and write."""

from __future__ import annotations

import numpy as np

from topkv_transformers.stock import StockLayers


class CacheState:
    """The rows of one cache. Columns are positions of the padded batch.

    Attributes:
        slots: the request slot of each row; empty before the first forward.
        seen: columns that have been appended, padding included.
        prompt: columns below which a forward is prefill, even if it is one token long.
        padding: int64 ``[B]`` columns of left padding of each row, so far.
        stock: the layers that topkv leaves alone.
    """

    def __init__(self, stock: StockLayers | None = None) -> None:
        self.slots: list[int] = []
        self.stock = stock or StockLayers()
        self.clear()

    def begin(self, slots: list[int]) -> None:
        """Give the rows their requests."""
        self.slots = slots
        self.padding = np.zeros(len(slots), dtype=np.int64)

    def clear(self) -> list[int]:
        """Forget the rows, and return their slots."""
        slots = self.slots
        self.begin([])
        self.seen = self.prompt = 0
        self.stock.reset()
        return slots
