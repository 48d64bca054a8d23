"""A prompt whose pages are on their way from a storage to the host pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from topkv.memory.manager import SparseKVCacheManager
from topkv_prefixes.calls import Calls, Workers
from topkv_prefixes.objects import problem_of
from topkv_prefixes.pages import PrefixKVPool
from topkv_prefixes.places import PagePlaces

BATCH_BYTES, MOST_PAGES = 128 << 20, 128
"""Most bytes and pages of a call. Each call costs the thread that runs forwards some work."""

AT_ONCE, ASIDE = 12, 2
"""Calls for one prompt that are begun or wait for a thread: more than there are threads while
somebody waits for the prompt, few while others decode."""


@define
class Shared:
    """Objects that all fetches of a coordinator share.

    Attributes:
        manager, host: the memory of both tiers, and its host pool.
        places: places of the bytes of a page.
        calls, readers: calls to the storage, and the threads that make them.
        fingerprint: fingerprint of the coordinator's pages.
    """

    manager: SparseKVCacheManager
    host: PrefixKVPool
    places: PagePlaces
    calls: Calls
    readers: Workers
    fingerprint: bytes

    @property
    def batch(self) -> int:
        """Pages of a call."""
        return min(MOST_PAGES, max(1, BATCH_BYTES // self.places.object_bytes))

    def release(self, pages: Sequence[int]) -> None:
        """Give back pages that were lent. Pages that are free then may be half written."""
        self.manager.poison(self.host.take_back(pages))


@define(eq=False)
class Batch:
    """Pages that one call gets.

    Attributes:
        pages: leased, and written by the call.
        keys: keys in the storage; ``names`` are those in the host pool.
        rows: memory for headers, and for parts outside of the host pool.
        left: event after which the device no longer touches a page for its last holder; None on
            a CPU.
        begun: True once a thread has begun the call.
        dropped: True if no thread is to begin.
        good: which pages are right, when the call has ended.
    """

    pages: list[int]
    keys: Sequence[bytes]
    names: Sequence[bytes]
    rows: Tensor
    left: torch.cuda.Event | None
    begun: bool = False
    dropped: bool = False
    good: list[bool] | None = None


@define(eq=False)
class Fetch:
    """Gets the pages of a prompt, in order and up to the first that is not there.

    The thread that runs forwards calls its methods; others only call the storage. Pages are
    published as they come, and held until ``release``.

    Attributes:
        shared: objects of all fetches.
        keys: keys in the storage of the pages that the host lacks; ``names`` are those in the
            host pool.
        most: most pages that may be leased.
        count: pages that the storage has, None while nobody knows.
        landed: pages that came.
        news: True if something has happened since ``advance``.
        stragglers: batches whose thread still runs although nobody waits for them.
    """

    shared: Shared
    keys: Sequence[bytes]
    names: Sequence[bytes]
    most: int
    held: list[int] = field(factory=list)
    stragglers: list[Batch] = field(factory=list)
    count: int | None = None
    landed: int = 0
    news: bool = False
    _asked: int = 0
    _stopped: bool = False
    _batches: deque[Batch] = field(factory=deque)

    def hold(self, pages: Sequence[int]) -> None:
        """Keep pages from being given out, such as pages before the missing ones."""
        self.shared.host.share(pages)
        self.shared.host.lend(pages)
        self.held.extend(pages)

    def begin(self) -> None:
        """Have a thread ask the storage how many pages it has."""
        self.shared.readers.add(self._probe)

    def advance(self, at_once: int = ASIDE) -> bool:
        """Publish what has come, ask for more, and return whether nothing more will come.

        Args:
            at_once: most calls under way, ``AT_ONCE`` if somebody waits for the fetch.
        """
        self.news = False
        if self.shared.calls.forked:
            self.stop()
        while self._batches and (good := self._batches[0].good) is not None:
            self._land(self._batches.popleft(), good)
        if self._stopped:
            return True
        if self.count is None:
            return False
        while self._asked < self.count and len(self._batches) < at_once and self._ask():
            pass
        return not self._batches and self._asked >= self.count

    def stop(self) -> None:
        """Wait for nothing more. Pages of a call that runs stay leased until ``tidy``."""
        self._stopped = True
        while self._batches:
            batch = self._batches.popleft()
            with self.shared.calls.changed:
                batch.dropped = not batch.begun or self.shared.calls.forked
            if batch.dropped:
                self.shared.release(batch.pages)
            else:
                self.stragglers.append(batch)
        self.tidy()

    def tidy(self) -> bool:
        """Give back the pages that no thread writes any more; return True if none is left."""
        for batch in [*self.stragglers]:
            # Asked once, for its thread may end at any time; in a child it has.
            if batch.good is not None or self.shared.calls.forked:
                self.stragglers.remove(batch)
                self.shared.release(batch.pages)
        return not self.stragglers

    def release(self) -> None:
        """Stop, and hold nothing: landed pages are kept as other pages without holders are."""
        self.stop()
        held, self.held = self.held, []
        self.shared.release(held)

    def _ask(self) -> bool:
        """Have a thread get further pages; False if there is no room for them."""
        shared, count = self.shared, int(self.count or 0)
        size = min(shared.batch, count - self._asked, self.most - self._asked, shared.host.free)
        if size <= 0:
            self.count = self._asked
            return False
        pages = shared.host.lease(size)
        shared.host.lend(pages)
        some = slice(self._asked, self._asked + size)
        rows, left = shared.places.rows(size, pinned=True), _mark_of(shared.manager.device)
        batch = Batch(pages, self.keys[some], self.names[some], rows, left)
        self._batches.append(batch)
        self._asked += size
        shared.readers.add(lambda: self._get(batch))
        return True

    def _land(self, batch: Batch, good: Sequence[bool]) -> None:
        """Publish the first pages of a batch that are right, and stop at one that is not."""
        count = [*good, False].index(False)
        shared, pages = self.shared, batch.pages[:count]
        self.held.extend(batch.pages)
        if pages:
            shared.places.unstage(pages, batch.rows[:count])
            shared.host.publish(pages, batch.names[:count])
        self.landed += count
        if count < len(batch.pages):
            self.stop()

    # In other threads.

    def _probe(self) -> None:
        found = 0
        try:
            if not self._stopped:
                found = self.shared.calls("exists", self.keys) or 0
        finally:
            self._report()
            self.count = max(0, min(int(found), len(self.keys)))
            self._report()

    def _get(self, batch: Batch) -> None:
        shared, good = self.shared, [False] * len(batch.pages)
        with shared.calls.changed:
            if batch.dropped:
                return
            batch.begun = True
        try:
            if batch.left is not None:
                batch.left.synchronize()
            places = [
                shared.places.place(page, row)
                for page, row in zip(batch.pages, batch.rows.numpy(), strict=True)
            ]
            done = shared.calls("get", batch.keys, places)
            good = self._checked(batch, places, done or good)
        finally:
            batch.good = good
            self._report()

    def _checked(
        self, batch: Batch, places: Sequence[Sequence[np.ndarray]], done: Sequence[bool]
    ) -> list[bool]:
        """Return which pages of a batch are right, by header and checksum."""
        shared, good, damaged = self.shared, [], []
        for key, (header, *body), there in zip(batch.keys, places, done, strict=False):
            wrong = there and problem_of(header, body, key, shared.fingerprint)
            good.append(bool(there) and not wrong)
            damaged += [key] if wrong else []
        count = sum(good)
        with shared.calls.changed:
            shared.calls.counts.damaged += len(damaged)
            shared.calls.counts.fetched += count
            shared.calls.counts.fetched_bytes += count * shared.places.object_bytes
        if damaged:
            shared.calls("delete", damaged)
        return good + [False] * (len(batch.pages) - len(good))

    def _report(self) -> None:
        with self.shared.calls.changed:
            self.news = True
            self.shared.calls.changed.notify_all()


def _mark_of(device: torch.device) -> torch.cuda.Event | None:
    """Record all work of the current stream, for a thread that waits; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event
