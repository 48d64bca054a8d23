"""Pages of requests: one table on the host, whose changed rows a forward uploads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from topkv.config import LoweredConfig
from topkv.errors import HostMemoryError, RequestError, undone_by
from topkv.kv.step import StepUploader
from topkv.memory.manager import SparseKVCacheManager
from topkv.types import newest_units


class PageTable:
    """The host pages that each request slot holds. R slots.

    Args:
        config: sizes.
        manager: leases, copies and poisons pages.
        step: where changed rows are uploaded.

    Attributes:
        table: int32 ``[R, max_pages]`` host pages of each request in order, 0 behind them.
        count: int32 ``[R]`` pages of each request.
    """

    def __init__(
        self, config: LoweredConfig, manager: SparseKVCacheManager, step: StepUploader
    ) -> None:
        self.manager, self.step = manager, step
        self.page_tokens, self.limit = config.page_tokens, config.max_request_tokens
        # More columns than pages: behind a full row stands page 0, which nobody holds, for all
        # tokens that a step can append.
        most = self.limit // self.page_tokens
        columns = most + newest_units(config.max_queries, self.page_tokens)
        self._table = np.zeros((config.max_requests, columns), dtype=np.int32)
        self.table = self._table[:, :most]
        self.count = np.zeros(config.max_requests, dtype=np.int32)
        self._changed: set[int] = set()

    def of(self, slot: int) -> list[int]:
        """Return the host pages of a request, in order."""
        pages: list[int] = self.table[slot, : self.count[slot]].tolist()
        return pages

    def behind(self, slot: int, tokens: int) -> list[int]:
        """Return the pages of a request that hold its tokens from ``tokens`` on."""
        pages: list[int] = self.table[slot, tokens // self.page_tokens : self.count[slot]].tolist()
        return pages

    def needed(self, tokens: int) -> int:
        """Return the number of pages that ``tokens`` tokens take."""
        return -(-tokens // self.page_tokens)

    def upload(self) -> None:
        """Let the device see the rows that have changed."""
        self.step.upload_pages(self.table, self._changed)
        self._changed.clear()

    def lease(self, needs: Sequence[tuple[int, int]], spare: int = 0) -> None:
        """Give each slot the pages for its length: ``(slot, length)``, all or none.

        At least ``spare`` pages stay free afterwards, or nothing changes.
        """
        missing = [(slot, self._missing(slot, length)) for slot, length in needs]
        total = sum(count for _, count in missing)
        pages = self.manager.host.lease(total + spare)
        self.manager.host.release(pages[total:])
        for slot, count in missing:
            if count:
                self.write(slot, int(self.count[slot]), pages[:count])
                pages = pages[count:]

    def without_page(self, slots: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return the slots of tokens that have no page, or one that others share.

        Args:
            slots: int64 ``[n]`` of each token.
            places: int32 ``[n]`` its position.
        """
        page = self._table[slots, places // self.page_tokens]
        in_need: np.ndarray = slots[self.manager.host.references.take(page) != 1]
        return in_need

    def own(self, places: Sequence[tuple[int, int, int]]) -> None:
        """Lease the pages that a forward writes, and copy those that are shared; all or none.

        Args:
            places: ``(slot, first, end)`` tokens that are written.
        """
        written = [
            (slot, index)
            for slot, first, end in places
            for index in range(first // self.page_tokens, self.needed(end))
        ]
        self.lease([(slot, end) for slot, _, end in places], spare=self._copies_needed(written))
        for slot, index in written:
            self.own_page(slot, index)

    def own_page(self, slot: int, index: int) -> None:
        """Copy a shared page before it is written: entries and representations."""
        host = self.manager.host
        if index >= self.count[slot] or not host.shared(shared := int(self.table[slot, index])):
            return
        (copy,) = host.lease(1)
        with undone_by(host.release, [copy]):
            self.manager.copy_page(shared, copy)
        self.table[slot, index] = copy
        self._changed.add(slot)
        host.release([shared])

    def add(self, slot: int, pages: Sequence[int]) -> None:
        """Let a slot hold further pages, which others may hold too."""
        first, most = int(self.count[slot]), self.table.shape[1]
        if first + len(pages) > most:
            raise RequestError(
                f"a request has at most {most} pages, got {len(pages)} behind its {first}; raise "
                "max_request_tokens"
            )
        self.manager.host.share(pages)
        self.write(slot, first, pages)

    def replace(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Let a slot hold other pages in place of those from column ``first`` on."""
        row = self.table[slot, first : first + len(pages)]
        old: list[int] = row.tolist()
        self.manager.host.share(pages)
        row[:] = pages
        self._changed.add(slot)
        self.manager.poison(self.manager.host.release(old))

    def shrink(self, slot: int, keep: int) -> None:
        """Release the pages behind the first ``keep``; those that are free now are poisoned."""
        behind = self.of(slot)[keep:]
        self.write(slot, min(keep, int(self.count[slot])), [])
        self.manager.poison(self.manager.host.release(behind))

    def _missing(self, slot: int, length: int) -> int:
        """Count the pages that a request lacks to hold ``length`` tokens."""
        if length > self.limit:
            raise HostMemoryError(
                f"a request of {length} tokens exceeds max_request_tokens = {self.limit}; "
                "shorten the prompt or raise it"
            )
        return max(0, self.needed(length) - int(self.count[slot]))

    def _copies_needed(self, written: Sequence[tuple[int, int]]) -> int:
        """Count the pages that ``own_page`` will lease for all of these ``(slot, index)``."""
        held = (int(self.table[slot, at]) for slot, at in written if at < self.count[slot])
        references = self.manager.host.references
        return sum(min(n, int(references[page]) - 1) for page, n in Counter(held).items())

    def write(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Put pages into a row from column ``first``; nothing stands behind them."""
        self.table[slot, first:] = 0
        self.table[slot, first : first + len(pages)] = pages
        self.count[slot] = first + len(pages)
        self._changed.add(slot)
