"""The step tensors: what changes from forward to forward, at fixed device addresses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from topkv.types import StepTensors

_FIELDS = 5


class StepUploader:
    """Uploads one packed int32 block per forward, and page-table rows when they change.

    Args:
        limits: unit of each group, and whether its algorithm lets the tail compete.
        max_batch: most decode rows of a forward.
        shape: of the page table, ``[max_requests, max_pages]``.
        device: where they lie.

    Attributes:
        step: the step tensors, narrowed to the rows of the forward.
        limits: int32 ``[B]`` of each group: how many units of a row can be selected.
    """

    def __init__(
        self,
        limits: Sequence[tuple[int, bool]],
        max_batch: int,
        shape: tuple[int, int],
        device: torch.device,
    ) -> None:
        self.device = device
        self._limits = limits
        self._packed = torch.zeros(
            (_FIELDS + len(limits), max_batch), dtype=torch.int32, device=device
        )
        self._packed[0] = -1
        table = torch.zeros(shape, dtype=torch.int32, device=device)
        slots, lengths, high, appended, resident = self._packed[:_FIELDS]
        self.step = StepTensors(slots, lengths, high, appended, resident, table)
        self.limits: list[Tensor] = list(self._packed[_FIELDS:])

    def upload_pages(self, table: np.ndarray, slots: Iterable[int]) -> None:
        """Upload rows of the host's page table, int32 ``[R, max_pages]``."""
        for slot in slots:
            self._copy(self.step.page_table[slot], table[slot])

    def upload(
        self,
        slots: np.ndarray,
        lengths: np.ndarray,
        high: np.ndarray,
        appended: np.ndarray,
        resident: np.ndarray,
    ) -> None:
        """Upload the decode rows of a forward, ``[B]`` each; see ``topkv.types.StepTensors``."""
        batch = len(slots)
        values = np.zeros(tuple(self._packed.shape), dtype=np.int32)
        values[0] = -1
        values[:_FIELDS, :batch] = slots, lengths, high, appended, resident
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
