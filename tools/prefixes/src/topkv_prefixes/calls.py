"""Threads that call a storage, and leave it alone for a while when it fails.

Threads do not outlive a fork: a child leaves the storages of its parent alone, whose connections
and files it shares. Code that waits for a thread there looks at ``forked``.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import islice
from numbers import Integral
from threading import Condition, Thread, get_ident
from typing import Any
from weakref import WeakSet

from attrs import define

from topkv.messages import raised, shown
from topkv_prefixes.storage import Storage, StorageUsage

FAILURES, FIRST_PAUSE, LONGEST_PAUSE = 3, 1.0, 60.0
"""Failed calls of a hook in a row after which a storage is left alone; and the seconds of that at
first, which double each time that it fails again, and at most."""

logger = logging.getLogger(__name__)


@define
class StorageCounts:
    """Counts of a storage: pages that went there and came from there, and calls that failed.

    Attributes:
        found: tokens of prompts whose pages came from the storage.
        fetched, fetched_bytes: pages that came from the storage and were right, and their bytes.
        stored, stored_bytes: pages that the storage took, and their bytes.
        damaged: pages that came and were not what they should be.
        late: prompts that did not wait until all of their pages had come.
        failed: calls that raised, hung or gave a wrong answer.
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


def answer_of(hook: str, arguments: Sequence[Any], answer: Any) -> Any:
    """Check the answer of a storage, and return it in the form of the contract.

    Args:
        hook, arguments: the call.
        answer: the value that the call returned.

    Raises:
        TypeError: the answer has another form.
    """
    if hook == "exists" and isinstance(answer, Integral) and not isinstance(answer, bool):
        return int(answer)
    if hook in ("get", "put") and hasattr(answer, "__iter__"):
        done = list(islice(answer, len(arguments[0]) + 1))
        if len(done) == len(arguments[0]) and all(each in (False, True) for each in done):
            return [bool(each) for each in done]
        answer = done
    if hook == "usage" and isinstance(answer, StorageUsage):
        return answer
    expected = {
        "exists": "the number of keys that are there",
        "get": "true or false for each key",
        "put": "true or false for each key",
        "usage": "a StorageUsage",
    }.get(hook)
    if expected is None:
        return answer
    keys = f", of {len(arguments[0])} keys" if arguments else ""
    raise TypeError(f"expected {expected}, got {shown(answer)}{keys}")


_of_this_process: WeakSet[Calls | Workers] = WeakSet()


def _leave_to_parent() -> None:
    for each in list(_of_this_process):
        each.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


class Calls:
    """Calls a storage and remembers how that went. Any thread may use it.

    Args:
        storage: the storage.
        limit: seconds after which a call counts as hung.
        who: plugin, version and name of the storage, for people.

    Attributes:
        changed: guards ``counts``, and is notified whenever a call has ended.
        counts: counts so far.
        reason: the last failure, for people; None if nothing failed.
        forked: True in a child of the process that opened the storage.
    """

    def __init__(self, storage: Storage, limit: float, who: str) -> None:
        self.changed, self.counts = Condition(), StorageCounts()
        self.reason: str | None = None
        self.forked = False
        self._storage, self._limit, self._who = storage, limit, who
        self._since: dict[int, float] = {}
        self._failures: Counter[str] = Counter()  # in a row, by hook
        self._pause, self._until = FIRST_PAUSE, 0.0
        _of_this_process.add(self)

    def __call__(self, hook: str, *arguments: Any) -> Any:
        """Call a hook and return its answer; None if it raised, or gave a wrong one."""
        with self.changed:
            self._since[get_ident()] = time.monotonic()
        result, error = None, None
        try:
            result = answer_of(hook, arguments, getattr(self._storage, hook)(*arguments))
        except BaseException as why:  # in whatever way it fails: no thread ends, and no request
            error = f"{hook}: {raised(why)}"
        with self.changed:
            began = self._since.pop(get_ident())
            if error is None and time.monotonic() - began > self._limit:
                error = f"{hook}: it took {time.monotonic() - began:.1f} s"
            self._judge(hook, error)
            self.changed.notify_all()
        return result

    def failed(self, error: BaseException) -> None:
        """Count a job of a thread that has failed, and not in a hook."""
        with self.changed:
            self._judge("a thread", f"a thread: {raised(error)}")
            self.changed.notify_all()

    def leave_to_parent(self) -> None:
        """Turn away from the storage, in a child, whoever held the lock at the fork."""
        self.changed, self.forked = Condition(), True
        self._since.clear()
        self.reason = f"{self._who} is left to the process that this one was forked from"

    def _judge(self, hook: str, error: str | None) -> None:
        if error is None:
            if self._failures[hook] >= FAILURES:
                self._pause = FIRST_PAUSE
            self._failures[hook] = 0
            return
        self.counts.failed += 1
        self.reason, self._failures[hook] = f"{self._who}: {error}", self._failures[hook] + 1
        if self._failures[hook] >= FAILURES:
            logger.warning(
                "%s fails and is left alone for %.0f s; prompts are computed and pages not stored "
                "meanwhile. It last failed in %s",
                self._who,
                self._pause,
                error,
            )
            self._until = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)

    @property
    def available(self) -> bool:
        """True while the storage may be called: it did not fail lately, no call hangs, and there
        are threads to call it."""
        now = time.monotonic()
        with self.changed:
            hangs = any(now - since > self._limit for since in self._since.values())
            return now >= self._until and not hangs and not self.forked


def _log(error: BaseException) -> None:
    logger.warning("a thread of a storage failed: %s", raised(error))


class Workers:
    """Threads that do jobs, the oldest first. They end with the process, whatever they wait for.

    Args:
        count: number of threads.
        failed: called with the error of a job, which ends no thread; logs the error by default.

    Attributes:
        forked: True in a child of the process that has the threads.
    """

    def __init__(self, count: int, failed: Callable[[BaseException], None] = _log) -> None:
        self.forked, self._failed = False, failed
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed, self._busy, self._closed = Condition(), 0, False
        _of_this_process.add(self)
        for _ in range(count):
            Thread(target=self._work, name="topkv storage", daemon=True).start()

    def add(self, job: Callable[[], None]) -> None:
        """Queue a job, unless the workers are closed."""
        with self._changed:
            if not self._closed:
                self._jobs.append(job)
                self._changed.notify()

    def close(self) -> None:
        """Begin no further job. Jobs that have begun end by themselves."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify_all()

    def leave_to_parent(self) -> None:
        """Close, in a child that lacks the threads, whoever held the lock at the fork."""
        self._changed, self.forked = Condition(), True
        self._busy = 0
        self.close()

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
            except BaseException as error:
                self._failed(error)
            finally:
                del job
                with self._changed:
                    self._busy -= 1
