"""Threads that call a storage, and when it is left alone."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from threading import Condition, Thread, get_ident
from typing import Any

from attrs import define

from topkv.hooks.storage import Storage

FAILURES, FIRST_PAUSE, LONGEST_PAUSE = 3, 1.0, 60.0
"""Calls of a hook in a row that fail until a storage is left alone, and seconds for which it then
is: at first, doubled each time that it fails again, and at last."""

logger = logging.getLogger(__name__)


@define
class StorageCounts:
    """What went to a storage and came from it.

    Attributes:
        found: tokens of prompts whose pages came from it.
        fetched, fetched_bytes: pages that came from it and were right, and their bytes.
        stored, stored_bytes: pages that it took, and their bytes.
        damaged: pages that came and were not what they should be.
        late: prompts that did not wait until all of their pages had come.
        failed: calls that raised or hung.
        dropped: pages that were to be stored and were not: written again before they were read,
            more than ``queue`` holds, refused or left over.
    """

    found: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    stored: int = 0
    stored_bytes: int = 0
    damaged: int = 0
    late: int = 0
    failed: int = 0
    dropped: int = 0


class Calls:
    """Calls a storage and remembers how that went. Any thread.

    Args:
        storage: what is called.
        limit: seconds after which a call counts as hung.

    Attributes:
        changed: guards ``counts``, and is notified whenever a call has ended.
        counts: what was done.
        reason: what failed last, for people; None if nothing did.
    """

    def __init__(self, storage: Storage, limit: float) -> None:
        self.changed, self.counts = Condition(), StorageCounts()
        self.reason: str | None = None
        self._storage, self._limit = storage, limit
        self._since: dict[int, float] = {}
        self._failures: Counter[str] = Counter()  # in a row, by hook
        self._pause, self._until = FIRST_PAUSE, 0.0

    def __call__(self, hook: str, *arguments: Any) -> Any:
        """What a hook returns; None if it raised."""
        with self.changed:
            self._since[get_ident()] = time.monotonic()
        result, error = None, None
        try:
            result = getattr(self._storage, hook)(*arguments)
        except Exception as raised:  # a storage may fail in any way, and no request does for it
            error = f"{hook}: {type(raised).__name__}: {raised}"
        with self.changed:
            began = self._since.pop(get_ident())
            if error is None and time.monotonic() - began > self._limit:
                error = f"{hook}: it took {time.monotonic() - began:.1f} s"
            self._judge(hook, error)
            self.changed.notify_all()
        return result

    def _judge(self, hook: str, error: str | None) -> None:
        if error is None:
            if self._failures[hook] >= FAILURES:
                self._pause = FIRST_PAUSE
            self._failures[hook] = 0
            return
        self.counts.failed += 1
        self.reason, self._failures[hook] = error, self._failures[hook] + 1
        if self._failures[hook] >= FAILURES:
            logger.warning(
                "%s fails and is left alone for %.0f s; prompts are computed and pages not stored "
                "meanwhile. It last failed in %s",
                type(self._storage).__name__,
                self._pause,
                error,
            )
            self._until = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)

    @property
    def available(self) -> bool:
        """Whether it is worth while to ask: it did not fail lately, and no call hangs."""
        now = time.monotonic()
        with self.changed:
            hangs = any(now - since > self._limit for since in self._since.values())
            return now >= self._until and not hangs


class Workers:
    """Threads that do jobs, the oldest first. They end with the process, whatever they wait for.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed, self._busy, self._closed = Condition(), 0, False
        for _ in range(count):
            Thread(target=self._work, name="topkv storage", daemon=True).start()

    def add(self, job: Callable[[], None]) -> None:
        """Have a job done, which must not raise."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()

    def close(self) -> None:
        """Begin no further job. Who is at work ends alone."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify_all()

    @property
    def left(self) -> int:
        """Jobs that are not done."""
        with self._changed:
            return len(self._jobs) + self._busy

    @property
    def busy(self) -> int:
        """Jobs that are being done."""
        with self._changed:
            return self._busy

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                job = self._jobs.popleft()
                self._busy += 1
            try:
                job()
            finally:
                del job
                with self._changed:
                    self._busy -= 1
