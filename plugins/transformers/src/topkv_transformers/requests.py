"""The requests of the caches of an attached model, between its forwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from topkv import SparseCoordinator
from topkv.errors import RequestError
from topkv_transformers.cache import CacheState
from topkv_transformers.forwards import Forward


class CacheRequests:
    """The part of ``AttachedModel`` that begins, reserves, cuts, copies and ends requests.

    Attributes:
        coordinator: where the requests live.
        forward: the open forward, or None.
        attached: False once the model was detached; the coordinator is closed then.
    """

    attached: bool

    def __init__(self, coordinator: SparseCoordinator) -> None:
        self.coordinator = coordinator
        self.forward: Forward | None = None
        self._busy = False
        self._retired: list[int] = []

    def check_attached(self) -> None:
        if not self.attached:
            raise RequestError("the model was detached; attach it again and make a new cache")

    def begin(self, state: CacheState, rows: int) -> None:
        """Give a cache ``rows`` requests, all or none."""
        self.check_attached()
        with self._exclusive(), self._all_or_none():
            slots = [self.coordinator.request_begin() for _ in range(rows)]
        state.begin(slots)

    def reserve(self, state: CacheState, tokens: Sequence[int]) -> None:
        """Lease pages for ``tokens`` further tokens of each row, for all rows or for none."""
        self.check_attached()
        with self._exclusive():
            try:
                for slot, count in zip(state.slots, tokens, strict=True):
                    self.coordinator.reserve(slot, count)
            except BaseException:
                for slot in state.slots:
                    self.coordinator.truncate(slot, self.coordinator.length(slot))
                raise

    def truncate(self, state: CacheState, columns: int) -> None:
        """Cut a cache to its first ``columns`` columns."""
        self.check_attached()
        lengths = np.maximum(columns - state.padding, 0).tolist()
        with self._exclusive():
            try:
                self._cut(state.slots, lengths)
            except BaseException:  # rows of different ends would be wrong without a word
                self._cut(state.slots, lengths)
                raise
            finally:
                state.seen = columns
                state.prompt = min(state.prompt, columns)

    def fork(self, state: CacheState, twin: CacheState) -> None:
        """Give ``twin`` copies of the requests of ``state``, all or none."""
        self.check_attached()
        with self._exclusive(), self._all_or_none():
            slots = [self.coordinator.fork(slot) for slot in state.slots]
        twin.slots, twin.padding = slots, state.padding.copy()
        twin.seen, twin.prompt = state.seen, state.prompt

    def retire(self, slots: list[int]) -> None:
        """End requests, at once or, if the garbage collector calls at a bad time, soon."""
        self._retired.extend(slots)
        if self.attached and self.forward is None and not self._busy:
            with self._exclusive():
                pass

    def _cut(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        for slot, length in zip(slots, lengths, strict=True):
            self.coordinator.truncate(slot, length)

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """End the requests that begin inside, also those that are half begun, if it fails."""
        active = self.coordinator.tracker.active
        before = active.copy()
        try:
            yield
        except BaseException:
            self._end(np.flatnonzero(active & ~before).tolist())
            raise

    def _end(self, slots: list[int]) -> None:
        for slot in slots:
            self.coordinator.request_end(slot)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Calls of the coordinator that a finalizer must not cut into; then what it left."""
        self._busy = True
        try:
            yield
            while self._retired and self.forward is None:
                self.coordinator.request_end(self._retired.pop())
        finally:
            self._busy = False
