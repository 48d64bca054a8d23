"""Requests: who holds which slot and which pages, how long each is, and what is still to be done.

The one owner of a request. Its state is arrays over all slots, so that a step handles all rows at
once, and its pages in one table. Engines call this through ``SparseCoordinator``, which refuses
most of it while a forward is open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import frozen

from topkv.config import LoweredConfig
from topkv.errors import DeviceMemoryError, HostMemoryError, RequestError
from topkv.kv.step import StepUploader
from topkv.layers import Forward
from topkv.memory import SparseKVCacheManager
from topkv.pages import PageTable
from topkv.selectors import Selector


@frozen
class Admission:
    """Answer of ``can_admit``: truthy when there is room, else with the reasons."""

    reasons: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.reasons


class Requests:
    """Host-side state of every request slot. R slots, G groups.

    Args:
        config: sizes.
        manager: the memory of both tiers.
        step: where page tables are uploaded.
        transfers: of each group.
        generated: most tokens that may follow a prompt.
        selectors: of all sparse layers.

    Attributes:
        active: bool ``[R]`` the slot holds a request.
        length: int32 ``[R]`` tokens that have been appended.
        high: int32 ``[R]`` the largest length that the ring has seen.
        resident: bool ``[R]`` LRU slot u holds unit u, as long as the request fits.
        dirty: bool ``[R]`` decode has appended tokens since the open unit was flushed.
        fresh: bool ``[R]`` prompt tokens came since the last ``settle``, or none was called.
        settled: int32 ``[G, R]`` tokens that ``settle`` of a group has seen.
        prompt: int32 ``[R]`` tokens at the last settle that closed a prompt.
        pages: the pages of each.
    """

    def __init__(
        self,
        config: LoweredConfig,
        manager: SparseKVCacheManager,
        step: StepUploader,
        transfers: Sequence[Any],
        generated: int,
        selectors: Sequence[Selector],
    ) -> None:
        self.config, self.manager, self.step = config, manager, step
        self.transfers, self.selectors, self.generated = transfers, selectors, generated
        slots = config.max_requests
        self.active = np.zeros(slots, dtype=bool)
        self.length = np.zeros(slots, dtype=np.int32)
        self.high = np.zeros(slots, dtype=np.int32)
        self.resident = np.zeros(slots, dtype=bool)
        self.dirty = np.zeros(slots, dtype=bool)
        self.fresh = np.zeros(slots, dtype=bool)
        self.settled = np.zeros((len(config.groups), slots), dtype=np.int32)
        self.prompt = np.zeros(slots, dtype=np.int32)
        self.pages = PageTable(config, manager, step)

    # Slots.

    @property
    def free(self) -> int:
        """Slots that hold no request."""
        return int((~self.active).sum())

    def begin(self) -> int:
        """Take the lowest free slot.

        Raises:
            DeviceMemoryError: every slot holds a request.
        """
        if self.active.all():
            raise DeviceMemoryError(
                f"all {len(self.active)} request slots are taken; end a request or raise "
                "max_requests"
            )
        slot = int(np.argmin(self.active))
        self.length[slot] = self.high[slot] = self.prompt[slot] = 0
        self.settled[:, slot] = 0
        self.resident[slot] = self.config.resident_fast_path
        self.dirty[slot], self.fresh[slot] = False, True
        self.active[slot] = True
        return slot

    def end(self, slot: int) -> None:
        """Give back everything that a request holds.

        The slot stays taken until all is forgotten, so that an end that was cut short can be
        called again.
        """
        self.check(slot)
        self.manager.forget_slot(slot)
        for transfer in self.transfers:
            transfer.reset(slot)
        self.pages.shrink(slot, 0)
        self.active[slot] = False
        self.length[slot] = self.high[slot] = 0

    def check(self, slot: int) -> None:
        """Refuse a slot that holds no request."""
        if not 0 <= slot < len(self.active) or not self.active[slot]:
            raise RequestError(
                f"slot {slot} holds no request; active slots are "
                f"{np.flatnonzero(self.active).tolist()}"
            )

    def check_all(self, slots: np.ndarray) -> None:
        """Refuse inactive slots and slots that are named twice."""
        known = (slots >= 0) & (slots < len(self.active))
        if not (known.all() and self.active[slots].all()):
            for slot in slots.tolist():
                self.check(slot)
        named = np.bincount(slots, minlength=1)
        if named.max() > 1:
            raise RequestError(f"slot {named.argmax()} is named twice in one forward")

    def check_generated(self, slots: np.ndarray, tokens: int) -> None:
        """Refuse tokens that an algorithm which chooses once could not attend.

        Args:
            slots: int32 ``[B]`` requests that generate ``tokens`` further ones.
        """
        prompt = np.where(self.fresh[slots], self.length[slots], self.prompt[slots])
        over = slots[self.length[slots] - prompt + tokens > self.generated]
        if len(over):
            raise RequestError(
                f"slots {over.tolist()} would have more than {self.generated} tokens after their "
                "prompt, and the algorithm has room for no more; raise its parameter 'generated', "
                "or let it drop the oldest of them"
            )

    def can_admit(self, tokens: int, requests: int = 1) -> Admission:
        """Whether ``requests`` new requests of ``tokens`` tokens each would find room.

        Buffers, rings, maps, representations and resident pages are allocated for
        ``max_requests`` and ``max_tokens`` when the coordinator is made, so what can run out
        are slots and pages.
        """
        reasons, limit = [], self.config.max_request_tokens
        if requests > self.free:
            reasons.append(f"{requests} request slots are needed and {self.free} are free")
        if tokens > limit:
            reasons.append(f"{tokens} tokens exceed max_request_tokens = {limit}")
        pages, free = requests * self.pages.needed(tokens), self.manager.host.free
        if pages > free:
            reasons.append(f"{pages} host pages are needed and {free} are free")
        return Admission(tuple(reasons))

    def reserve(self, slot: int, tokens: int) -> None:
        """Lease the pages for ``tokens`` further tokens now.

        Raises:
            HostMemoryError: they are not to be had; the request is as it was.
            RequestError: the algorithm has no room for so many tokens after the prompt.
        """
        self.check(slot)
        if not self.fresh[slot]:  # else they may all be prompt
            self.check_generated(np.asarray([slot]), tokens)
        self.pages.lease([(slot, int(self.length[slot]) + tokens)])

    # Tokens that go, come back or are copied.

    def rollback(self, slot: int, length: int) -> None:
        """Take back the newest tokens, as far as the ring reaches: a change of length.

        The pages stay with the request.

        Raises:
            RequestError: the tail unit of the new length has left the ring; use ``truncate``.
        """
        self._check_length(slot, length)
        for group in self.manager.groups:
            low = (int(self.high[slot]) - 1) // group.unit - group.ring_slots + 1
            if group.residency == "sparse" and low > 0 and (length - 1) // group.unit < low:
                raise RequestError(
                    f"rollback to {length} tokens reaches behind the ring, which starts at token "
                    f"{low * group.unit}; truncate can go there"
                )
        self._cut(slot, length)
        self.dirty[slot] = True

    def truncate(self, slot: int, length: int) -> None:
        """Cut a request to ``length`` tokens and forget every device copy. Cold."""
        self._check_length(slot, length)
        self.flush(slot)
        self._cut(slot, length)
        self.pages.shrink(slot, self.pages.needed(length))
        self.restore(slot)

    def fork(self, slot: int) -> int:
        """A new request with the same tokens. Cold.

        Full pages are shared, the open page is copied with its representations, and state
        that is keyed by slot is copied.

        Raises:
            DeviceMemoryError, HostMemoryError: no room; nothing has changed.
        """
        self.check(slot)
        length = int(self.length[slot])
        partial = length % self.config.page_tokens != 0
        if partial and not self.manager.host.free:
            raise HostMemoryError(
                "fork needs one free host page for the open page and none is free; end requests "
                "or raise max_tokens"
            )
        twin = self.begin()
        try:
            self.flush(slot)
            pages = self.pages.needed(length)
            self.pages.share(slot, twin, pages)
            for values in (self.length, self.fresh, self.settled, self.prompt):
                values[..., twin] = values[..., slot]
            if partial:
                self.pages.own_page(twin, pages - 1)
            self.manager.copy_slot(slot, twin)
            for selector in self.selectors:
                selector.copy(slot, twin)
            self.restore(twin)
        except BaseException:
            self.end(twin)
            raise
        return twin

    def flush(self, slot: int) -> None:
        """Move the open unit to the host, so that all tokens are there. Cold."""
        self.check(slot)
        if self.dirty[slot]:
            self.pages.upload()
            self.manager.synchronize()
            length, high = int(self.length[slot]), int(self.high[slot])
            for transfer in self.transfers:
                transfer.flush(slot, length, high, bool(self.resident[slot]))
            self.dirty[slot] = False

    def restore(self, slot: int) -> None:
        """Fill ring and, where the request fits, buffer from the host, which has all tokens."""
        fast = self.config.resident_fast_path
        self.high[slot], self.resident[slot] = self.length[slot], fast
        self.pages.upload()
        self.manager.synchronize()
        for transfer in self.transfers:
            transfer.restore(slot, int(self.length[slot]), fast)

    def _check_length(self, slot: int, length: int) -> None:
        self.check(slot)
        if not 0 <= length <= self.length[slot]:
            raise RequestError(f"length must be between 0 and {self.length[slot]}, got {length}")

    def _cut(self, slot: int, length: int) -> None:
        """Shorten a request; one that loses a part of its prompt is to be settled again."""
        self.length[slot] = length
        self.settled[:, slot] = np.minimum(self.settled[:, slot], length)
        self.fresh[slot] |= length < self.prompt[slot]
        for selector in self.selectors:
            selector.truncated(slot, length)

    # Forwards.

    def own_pages(self, writers: np.ndarray, chunks: Sequence[tuple[int, int]]) -> None:
        """Lease the pages that a forward writes, and copy those that are shared; all or none.

        Args:
            writers: int32 ``[B]`` slots that append one token each.
            chunks: ``(slot, tokens)``.
        """
        in_need = self.pages.without_page(writers, self.length[writers])
        writes = [*((slot, 1) for slot in in_need.tolist()), *chunks]
        lengths = [int(self.length[slot]) for slot, _ in writes]
        self.pages.own(
            [
                (slot, length, length + tokens)
                for (slot, tokens), length in zip(writes, lengths, strict=True)
            ]
        )

    def upload(self, slots: np.ndarray, appended: np.ndarray) -> None:
        """Upload the decode rows of a forward, and the pages.

        Args:
            slots: int32 ``[B]``, -1 for padded rows.
            appended: int32 ``[B]`` 1 where the row appends a token.
        """
        self.pages.upload()
        live = slots >= 0
        lengths = np.where(live, self.length[slots] + appended, 0)
        high = np.where(live, np.maximum(self.high[slots], lengths), 0)
        self.step.upload(slots, lengths, high, appended, live & self.resident[slots])

    def advance(self, forward: Forward) -> None:
        """Count the tokens of a forward that has ended."""
        writers = forward.writers
        self.length[writers] += 1
        self.dirty[writers] = True
        for chunk in forward.chunks:
            self.length[chunk.slot] += chunk.tokens
            self.fresh[chunk.slot] |= chunk.tokens > 0
        touched = [*writers.tolist(), *(chunk.slot for chunk in forward.chunks)]
        self.high[touched] = np.maximum(self.high[touched], self.length[touched])

    def abort(self, forward: Forward) -> None:
        """Forget the tokens of a forward that was dropped.

        What was written stays in the ring, so its bound moves although no length does. A chunk
        may have overwritten the whole ring; the host has everything before it.
        """
        writers = forward.writers
        self.high[writers] = np.maximum(self.high[writers], self.length[writers] + 1)
        for chunk in forward.chunks:
            if self.active[chunk.slot]:
                self.restore(chunk.slot)
