"""What the host knows of each request: its length, its pages, and what is still to be done."""

from __future__ import annotations

import numpy as np

from topkv.errors import DeviceMemoryError, RequestError


class RequestTracker:
    """Host-side state of every request slot, as arrays so that a step handles all rows at once.

    Attributes:
        active: bool ``[R]`` the slot holds a request.
        length: int32 ``[R]`` tokens that have been appended.
        high: int32 ``[R]`` the largest length that the ring has seen.
        resident: bool ``[R]`` LRU slot u holds unit u, as long as the request fits.
        dirty: bool ``[R]`` decode has appended tokens since the open unit was flushed.
        fresh: bool ``[R]`` prompt tokens came since the last ``settle``, or none was called.
        settled: int32 ``[groups, R]`` tokens that ``settle`` of a group has seen.
        prompt: int32 ``[R]`` tokens at the last settle that closed a prompt.
        pages: host pages of each request, in order.
    """

    def __init__(self, max_requests: int, groups: int, resident: bool) -> None:
        self.max_requests = max_requests
        self.active = np.zeros(max_requests, dtype=bool)
        self.length = np.zeros(max_requests, dtype=np.int32)
        self.high = np.zeros(max_requests, dtype=np.int32)
        self.resident = np.zeros(max_requests, dtype=bool)
        self.dirty = np.zeros(max_requests, dtype=bool)
        self.fresh = np.zeros(max_requests, dtype=bool)
        self.settled = np.zeros((groups, max_requests), dtype=np.int32)
        self.prompt = np.zeros(max_requests, dtype=np.int32)
        self.pages: list[list[int]] = [[] for _ in range(max_requests)]
        self._resident_at_start = resident

    @property
    def free(self) -> int:
        return int((~self.active).sum())

    def begin(self) -> int:
        """Take the lowest free slot.

        Raises:
            DeviceMemoryError: every slot holds a request.
        """
        if self.active.all():
            raise DeviceMemoryError(
                f"all {self.max_requests} request slots are taken; end a request or raise "
                "max_requests"
            )
        slot = int(np.argmin(self.active))
        self.active[slot] = True
        self.length[slot] = self.high[slot] = 0
        self.resident[slot] = self._resident_at_start
        self.dirty[slot] = False
        self.fresh[slot] = True
        self.settled[:, slot] = self.prompt[slot] = 0
        return slot

    def cut(self, slot: int, length: int) -> None:
        """Shorten a request; one that loses a part of its prompt is to be settled again."""
        self.length[slot] = length
        self.settled[:, slot] = np.minimum(self.settled[:, slot], length)
        self.fresh[slot] |= length < self.prompt[slot]

    def copy(self, slot: int, twin: int) -> None:
        """Give a fork the state of its request, pages and ring apart."""
        for values in (self.length, self.fresh, self.settled, self.prompt):
            values[..., twin] = values[..., slot]

    def end(self, slot: int) -> list[int]:
        """Free the slot and return the pages that it held."""
        self.check(slot)
        pages, self.pages[slot] = self.pages[slot], []
        self.active[slot] = False
        self.length[slot] = self.high[slot] = 0
        return pages

    def check(self, slot: int) -> None:
        """Refuse a slot that holds no request."""
        if not 0 <= slot < self.max_requests or not self.active[slot]:
            raise RequestError(
                f"slot {slot} holds no request; active slots are "
                f"{np.flatnonzero(self.active).tolist()}"
            )

    def check_all(self, slots: np.ndarray) -> None:
        """Refuse inactive slots and slots that are named twice."""
        known = (slots >= 0) & (slots < self.max_requests)
        if not (known.all() and self.active[slots].all()):
            for slot in slots.tolist():
                self.check(slot)
        named = np.bincount(slots, minlength=1)
        if named.max() > 1:
            raise RequestError(f"slot {named.argmax()} is named twice in one forward")
