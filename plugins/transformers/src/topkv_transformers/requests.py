"""The requests of the caches of an attached model, and the forward that is open over one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import numpy as np
from torch import Tensor

from topkv import SparseCoordinator
from topkv.errors import CapabilityError, OutOfMemory, RequestError
from topkv.kv.held import tensor_bytes
from topkv_transformers.attention import NamedAttention
from topkv_transformers.forwards import Forward, open_forward
from topkv_transformers.state import CacheState
from topkv_transformers.stock import FreshLayers, StockLayers
from topkv_transformers.turn import Turn
from topkv_transformers.watch import ModelWatch


class CacheRequests:
    """Begins, reserves, cuts, copies and ends the requests of all caches of a model.

    Args:
        coordinator: where the requests live.
        attention: which attention function the model calls.
        watch: what the model is now.
        stock: makes the layers of a cache that are not ours, None where ours stand.

    Attributes:
        forward: the open forward, or None.
        stand_in: in place of the state of any cache, in a step that is recorded for all of them.
        attached: False once the model was detached; the coordinator is closed then.
        turn: which thread uses the model.
    """

    def __init__(
        self,
        coordinator: SparseCoordinator,
        attention: NamedAttention,
        watch: ModelWatch,
        stock: FreshLayers,
    ) -> None:
        self.coordinator = coordinator
        self.attention = attention
        self.watch = watch
        self.stock = stock
        self.forward: Forward | None = None
        self.stand_in = CacheState(StockLayers(stock))
        self.attached = True
        self.turn = Turn()
        self._states: WeakSet[CacheState] = WeakSet()
        self._retired: list[int] = []

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RequestError(
            "an attached model can be neither copied nor saved whole, because it holds the "
            "requests of its coordinator; call detach() first (save_pretrained works as it is)"
        )

    def check_attached(self) -> None:
        if not self.attached:
            raise RequestError("the model was detached; attach it again and make a new cache")

    @property
    def stock_bytes(self) -> int:
        """Bytes that the stock layers of all caches hold on the device; copies may share them."""
        return tensor_bytes([state.stock.tensors for state in self._states])

    def close(self) -> None:
        """Free both tiers and refuse every further call."""
        self.attached = False
        self.coordinator.close()

    # Forwards.

    def open(self, state: CacheState, rows: int, columns: int, mask: Tensor | None) -> None:
        """Begin a forward of ``rows`` rows and ``columns`` new columns over a cache.

        Whoever runs the decoder's own ``forward`` in it names our attention function first.
        The caller has entered ``exclusive``. Errors are those of ``open_forward``; the cache is
        then as it was.
        """
        fresh, model = not state.slots, self.watch.current()
        if fresh:
            self.begin(state, rows)
        try:
            if rows != len(state.slots):
                raise RequestError(
                    f"the cache holds {len(state.slots)} rows and the forward brings {rows}"
                )
            with self._naming_holders(state):
                self.forward = open_forward(self.coordinator, state, columns, mask)
            self.forward.kept, self.forward.model = state.stock.keep(), model
            state.feed(model)
        except BaseException:
            self._recover()
            if fresh:
                self.release(state)
            raise

    def opened(self, state: CacheState) -> Forward:
        """The forward that is open over a cache, or over any if ``state`` is ``stand_in``.

        Raises:
            RequestError: there is none.
        """
        if self.forward is None or state not in (self.forward.state, self.stand_in):
            raise RequestError(
                "a TopkvCache serves forwards of the model that it was made for, as long as that "
                "is attached; make the cache with new_cache() of this model's handle"
            )
        return self.forward

    def end_forward(self, completed: bool) -> bool:
        """Append what the open forward brought if it was completed, else drop it.

        Returns:
            Whether this thread had a forward open.
        """
        forward = self.forward
        if forward is None or not self.turn.mine:
            return False
        with self._held():
            try:
                if completed:
                    self.coordinator.forward_end(forward.offloaded)
                    if forward.state.slots:  # else it was closed meanwhile
                        forward.state.seen += forward.columns
                    self._close_forward()
            finally:
                self._tidy()
        return True

    def reopen(self) -> None:
        """Drop what the open forward has done, which is a decode step, and begin it again."""
        self.coordinator.forward_abort()
        if self.forward is not None:
            forward = self.forward
            self.coordinator.forward_begin(decode=forward.state.slots, queries=forward.columns)

    # Requests.

    def begin(self, state: CacheState, rows: int, row: Callable[[int], int] | None = None) -> None:
        """Give a cache ``rows`` requests, all or none.

        Args:
            row: takes the slot of a row, by its number; by default one without tokens.
        """
        row = row or (lambda _: self.coordinator.request_begin())
        with self.exclusive(), self._naming_holders(state), self._all_or_none():
            slots = [row(number) for number in range(rows)]
        state.begin(slots)
        self._states.add(state)

    def reserve(self, state: CacheState, tokens: Sequence[int]) -> None:
        """Lease pages for ``tokens`` further tokens of each row, for all rows or for none."""
        with self.exclusive(), self._naming_holders(state):
            try:
                for slot, count in zip(state.slots, tokens, strict=True):
                    self.coordinator.reserve(slot, count)
            except BaseException:
                for slot in state.slots:
                    self.coordinator.truncate(slot, self.coordinator.length(slot))
                raise

    def truncate(self, state: CacheState, columns: int, kept: Any = None) -> None:
        """Cut a cache to its first ``columns`` columns; one that keeps none begins anew.

        Args:
            kept: what ``state.stock.keep`` returned when there were as many; None to crop. Tokens
                that were given back since then do not return, and a cache in which they were
                the newest ones is closed.

        Raises:
            CapabilityError: stock layers cannot be cropped, or tokens that would be the newest
                were given back; nothing has changed.
        """
        lengths, least = self._left(state, columns)
        with self.exclusive():
            if not columns or (columns < least and kept is not None):
                self.release(state)
                return
            if columns < least:
                reason = f"tokens before column {least} were given back while generating"
                reported = f"the cache cannot be cut to {columns} columns"
                raise CapabilityError(reported, [f"{reason}; keep as many, or close it"])
            if kept is None and columns < state.seen:
                state.stock.check_crop()
            try:
                self._cut(state, lengths)
            except BaseException:  # rows of different ends would be wrong without a word
                self._cut(state, lengths)
                raise
            finally:
                state.keep(columns)
                if kept is None:
                    state.stock.crop(columns)
                else:
                    state.stock.restore(kept)

    def _left(self, state: CacheState, columns: int) -> tuple[list[int], int]:
        """Tokens that rows of N columns have stored, and the fewest columns that a cut can
        leave: more than rows that have given back pages have to their left."""
        requests, slots = self.coordinator.requests, state.slots
        dropped, firm = requests.dropped[slots], requests.firm[slots]
        behind = np.where(dropped, state.padding + dropped + firm, 0)
        stored = np.maximum(columns - state.padding - dropped, 0)
        return stored.tolist(), int(behind.max(initial=0))

    def fork(self, state: CacheState, twin: CacheState) -> None:
        """Give ``twin`` copies of the requests of ``state``, all or none."""
        with self.exclusive(), self._naming_holders(twin), self._all_or_none():
            slots = [self.coordinator.fork(slot) for slot in state.slots]
        twin.slots, twin.padding = slots, state.padding.copy()
        twin.seen, twin.prompt = state.seen, state.prompt
        twin.fed, twin.known = state.fed, state.known
        twin.stock.restore(state.stock.keep())
        self._states.add(twin)

    def release(self, state: CacheState) -> None:
        """End the requests of a cache, at once or as soon as no forward is open. Idempotent.

        The garbage collector calls this too, at any time and in any thread.
        """
        slots = state.clear()
        self._retired.extend(slots)
        if slots and self.attached and self.forward is None and not self.turn.depth:
            self.abandon()

    def abandon(self) -> None:
        """Drop the open forward, if there is one, after any exception."""
        with self.exclusive():
            pass

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Calls that neither another thread nor a finalizer may cut into.

        A forward that is open when they begin was interrupted, and is dropped. Requests of
        caches that died meanwhile are ended before and after.

        Raises:
            RequestError: another thread uses the model, or it was detached; nothing has changed.
        """
        self.check_attached()
        with self._held():
            self._tidy()
            try:
                yield
            finally:
                self._end_retired()

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Take the turn, and keep it afterwards while a forward is open."""
        self.turn.enter()
        try:
            yield
        finally:
            self.turn.leave(keep=self.forward is not None)

    def _tidy(self) -> None:
        # The coordinator is asked too: an interrupt may come between its books and ours.
        if self.forward is not None or self.coordinator.forward is not None:
            self._recover()
        self._end_retired()

    def _recover(self) -> None:
        """Drop a forward that was cut short, wherever: its tokens are not appended."""
        forward = self._close_forward()
        self.coordinator.forward_abort()
        if forward is None:
            return
        state = forward.state
        if state.slots:  # else it was closed meanwhile
            state.seen = forward.seen
        if not state.seen:
            self.release(state)
        elif forward.kept is not None:
            state.stock.restore(forward.kept)
        for slot, length in zip(state.slots, forward.lengths, strict=False):
            if self.coordinator.length(slot) > length:
                self.coordinator.truncate(slot, length)

    def _close_forward(self) -> Forward | None:
        """Forget the open forward, and return it."""
        self.attention.restore()
        forward, self.forward = self.forward, None
        return forward

    def _cut(self, state: CacheState, lengths: Sequence[int]) -> None:
        """Cut the requests of a cache; drafts that were rejected by their lengths alone, for the
        ring holds all that one step has appended."""
        lost = self.coordinator.requests.high[state.slots] - lengths
        if (lost < state.most).all() and state.most > 1:
            self.coordinator.rollback(state.slots, lengths)
            return
        for slot, length in zip(state.slots, lengths, strict=True):
            self.coordinator.truncate(slot, length)

    @contextmanager
    def _naming_holders(self, state: CacheState) -> Iterator[None]:
        """Add to an error for want of room which caches beside that of ``state`` hold some."""
        try:
            yield
        except OutOfMemory as error:
            rows = [len(each.slots) for each in self._states if each is not state and each.slots]
            if not rows:
                raise
            raise type(error)(
                f"{error}; other caches of this model that are alive: {len(rows)}, with "
                f"{sum(rows)} requests; close() them, or drop what holds them. An output of "
                "generate with return_dict_in_generate=True has one in its past_key_values"
            ) from error

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Retire the requests that begin inside, also those that are half begun, if it fails.

        The ``exclusive`` around it ends them.
        """
        active = self.coordinator.requests.active
        before = active.copy()
        try:
            yield
        except BaseException:
            self._retired.extend(np.flatnonzero(active & ~before).tolist())
            raise

    def _end_retired(self) -> None:
        active = self.coordinator.requests.active
        while self._retired and self.forward is None and self.attached:
            slot = self._retired[0]  # a finalizer may add others behind it meanwhile
            if active[slot]:  # else an interrupt came after its end
                self.coordinator.request_end(slot)
            del self._retired[0]
