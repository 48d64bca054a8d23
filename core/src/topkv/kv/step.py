"""Step tensors: the values that change from forward to forward, at fixed device addresses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from topkv.types import StepTensors

FIELDS = 7
"""Rows of an upload's block before the limits: see ``StepRows``."""

_BLOCKS, _WAITS = 8, 4
"""Blocks that uploads are written to in turn, and how many of them wait by one event."""


class Staging:
    """Host memory that uploads are written to: pinned blocks in turn, each used again only when
    its copy has run. Pinning a new block for each upload takes longer than the upload.

    Args:
        shape: of an int32 upload.
        device: where uploads go.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        count = _BLOCKS if self._pinned else 1
        blocks = [
            torch.zeros(shape, dtype=torch.int32, device="cpu", pin_memory=self._pinned)
            for _ in range(count)
        ]
        self._copied = [torch.cuda.Event() for _ in range(0, count, _WAITS) if self._pinned]
        self._turns = cycle([(block, block.numpy(), at) for at, block in enumerate(blocks)])
        self._block, self._at = blocks[0], 0

    def next(self) -> np.ndarray:
        """The block to write."""
        self._block, values, self._at = next(self._turns)
        if self._pinned and self._at % _WAITS == 0:
            self._copied[self._at // _WAITS].synchronize()
        array: np.ndarray = values
        return array

    def copy_to(self, target: Tensor) -> None:
        """Copy the block that ``next`` gave, in stream order."""
        target.copy_(self._block, non_blocking=True)
        if self._pinned and self._at % _WAITS == _WAITS - 1:
            # The stream that copied, which is not the current one on machines of several GPUs.
            self._copied[self._at // _WAITS].record(torch.cuda.current_stream(target.device))


class StepRows:
    """Step tensors of all queries of the decode rows, or of one query each.

    Args:
        packed: int32 ``[fields, max_batch]`` block of an upload.
        page_table: ``[max_requests, max_pages]``, the same for all blocks.

    Attributes:
        step: the step tensors, narrowed to the rows of the forward.
        table_rows: int32 ``[B]`` row of the page table of each row; 0 of padded ones.
        queries: int32 ``[B]`` queries of each row, see ``topkv.types.Tables``.
        limits: int32 ``[B]`` of each group: how many units of a row can be selected.
    """

    def __init__(self, packed: Tensor, page_table: Tensor) -> None:
        self._packed = packed
        slots, lengths, high, resident, appended, self.table_rows, self.queries = packed[:FIELDS]
        self.step = StepTensors(slots, lengths, high, appended, resident, page_table)
        self.limits: list[Tensor] = list(packed[FIELDS:])

    def narrow(self, batch: int) -> None:
        """Narrow to the B rows of a forward."""
        step, packed = self.step, self._packed[:, :batch]
        step.slots, step.lengths, step.high, step.resident, step.appended = packed[:5]
        self.table_rows, self.queries = packed[5:FIELDS]
        self.limits = list(packed[FIELDS:])


class StepUploader:
    """Uploads one packed int32 block per forward, and page-table rows when they change.

    Args:
        limits: unit of each group, and True where its algorithm lets the tail compete.
        max_batch: most decode rows of a forward.
        shape: of the page table, ``[max_requests, max_pages]``.
        device: where the tensors are.
        single: queries of a row that are also served one by one, 0 where none are.

    Attributes:
        rows, step: step tensors of all queries of each row.
        singles: step tensors of query 0, 1, .. of each row, in which that query's token is the
            row's newest. A row that has no such query is padded.
        staging: what uploads are written to, on the host.
        packed: int32 ``[1 + single, FIELDS + groups, max_batch]``, what an upload writes: slots,
            lengths, high, resident, appended, table rows, queries, and the limit of each group.
        groups: ``limits``.
    """

    def __init__(
        self,
        limits: Sequence[tuple[int, bool]],
        max_batch: int,
        shape: tuple[int, int],
        device: torch.device,
        single: int = 0,
    ) -> None:
        self.device = device
        self.groups = limits
        packed = (1 + single, FIELDS + len(limits), max_batch)
        self.packed = torch.zeros(packed, dtype=torch.int32, device=device)
        self.packed[:, 0] = -1
        self.staging = self._steps, self._pages = (
            Staging(packed, device),
            Staging(shape[1:], device),
        )
        table = torch.zeros(shape, dtype=torch.int32, device=device)
        self.rows, *self.singles = (StepRows(block, table) for block in self.packed)
        self.step = self.rows.step

    def upload_pages(self, table: np.ndarray, slots: Iterable[int]) -> None:
        """Upload rows of the host's page table, int32 ``[R, max_pages]``."""
        for slot in slots:
            self._pages.next()[:] = table[slot]
            self._pages.copy_to(self.step.page_table[slot])

    def upload(
        self, slots: np.ndarray, counted: np.ndarray, appended: np.ndarray, queries: int
    ) -> None:
        """Upload the decode rows of a forward.

        Args:
            slots, appended: int64 and int32 ``[B]``; see ``topkv.types.StepTensors``.
            counted: int32 ``[3, B]`` lengths, high and resident, see there too.
            queries: Q, the most of a row in this forward.
        """
        blocks = self._steps.next()
        self._fill(blocks[0], slots, counted, appended, queries)
        if queries > 1 and self.singles:
            last = np.maximum(appended, 1) - 1
            for query, block in enumerate(blocks[1 : 1 + queries]):
                there = last >= query
                alone = np.stack([counted[0] - (last - query), *counted[1:]]) * there
                own = np.where(there, slots, -1)
                self._fill(block, own, alone, (appended > query).astype(np.int32), 1)
        self._steps.copy_to(self.packed)
        if len(slots) != self.step.batch:
            for rows in (self.rows, *self.singles):
                rows.narrow(len(slots))

    def _fill(
        self,
        block: np.ndarray,
        slots: np.ndarray,
        counted: np.ndarray,
        appended: np.ndarray,
        queries: int,
    ) -> None:
        """Write one block of an upload."""
        batch = len(slots)
        block[0, batch:], block[1:, batch:] = -1, 0
        values = block[:, :batch]
        values[0], values[1:4], values[4] = slots, counted, appended
        np.maximum(slots, 0, out=values[5])
        lengths = counted[0]
        behind = np.maximum(lengths - np.maximum(appended, 1, out=values[6]), 0)
        for row, (unit, selectable) in enumerate(self.groups, start=FIELDS):
            values[row] = lengths if selectable and queries == 1 else behind // unit
