"""The step tensors: what changes from forward to forward, at fixed device addresses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from topkv.requests import RequestTracker
from topkv.types import StepTensors

_FIELDS = 5


class StepUploader:
    """Uploads one packed int32 block per forward, and page-table rows when they change.

    Args:
        limits: unit of each sparse group, and 1 where its algorithm lets the tail compete.
        max_batch: most decode rows of a forward.
        max_pages: pages that one request can reach.

    Attributes:
        host_pages: int32 ``[R, max_pages]``, the page table as the host knows it; 0 is no page.
    """

    def __init__(
        self,
        tracker: RequestTracker,
        limits: Sequence[tuple[int, bool]],
        max_batch: int,
        max_pages: int,
        device: torch.device,
    ) -> None:
        self.tracker = tracker
        self.device = device
        self._limits = limits
        self._packed = torch.zeros(
            (_FIELDS + len(limits), max_batch), dtype=torch.int32, device=device
        )
        self._packed[0] = -1
        self.host_pages = np.zeros((tracker.max_requests, max_pages), dtype=np.int32)
        self._dirty: set[int] = set()
        table = torch.zeros((tracker.max_requests, max_pages), dtype=torch.int32, device=device)
        slots, lengths, high, appended, resident = self._packed[:_FIELDS]
        self.step = StepTensors(slots, lengths, high, appended, resident, table)
        self.limits: list[Tensor] = list(self._packed[_FIELDS:])

    def write_page_row(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Put host pages into a row from column ``first``; what stood behind becomes 0."""
        self.host_pages[slot, first:] = 0
        self.host_pages[slot, first : first + len(pages)] = pages
        self._dirty.add(slot)

    def upload_pages(self) -> None:
        for slot in self._dirty:
            self._copy(self.step.page_table[slot], self.host_pages[slot])
        self._dirty.clear()

    def upload(self, slots: np.ndarray, appended: np.ndarray) -> None:
        """Upload the decode rows of a forward.

        Args:
            slots: int32 ``[B]`` slots, -1 for padded rows.
            appended: int32 ``[B]`` 1 where the row appends a token.
        """
        self.upload_pages()
        batch = len(slots)
        tracker, live = self.tracker, slots >= 0
        lengths = np.where(live, tracker.length[slots] + appended, 0)
        values = np.empty((self._packed.shape[0], self._packed.shape[1]), dtype=np.int32)
        values[0] = -1
        values[1:] = 0
        values[:_FIELDS, :batch] = (
            slots,
            lengths,
            np.where(live, np.maximum(tracker.high[slots], lengths), 0),
            appended,
            live & tracker.resident[slots],
        )
        for row, (unit, selectable) in enumerate(self._limits, start=_FIELDS):
            closed = lengths if selectable else (lengths - 1) // unit
            values[row, :batch] = np.maximum(closed, 0)
        self._copy(self._packed, values)
        if batch != self.step.batch:
            step, packed = self.step, self._packed[:, :batch]
            step.slots, step.lengths, step.high, step.appended, step.resident = packed[:_FIELDS]
            self.limits = list(packed[_FIELDS:])

    def _copy(self, target: Tensor, values: np.ndarray) -> None:
        source = torch.from_numpy(np.ascontiguousarray(values))
        if self.device.type == "cuda":
            # The caching allocator of pinned memory keeps the block until the copy has run.
            target.copy_(source.pin_memory(), non_blocking=True)
        else:
            target.copy_(source)
