"""The tier below host memory: what goes to a storage, and what prompts get from it.

``begin`` and ``publish`` of ``Prefixes`` call it, between forwards. Nothing else waits for a
storage, and a step that decodes never does.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from topkv.checks import byte_size
from topkv.errors import ConfigError
from topkv.memory.manager import SparseKVCacheManager
from topkv.plugins import PluginRegistry
from topkv_prefixes.calls import Calls, StorageCounts, Workers
from topkv_prefixes.fetching import AT_ONCE, Fetch, Shared
from topkv_prefixes.objects import HEADER, owner_of, write_header
from topkv_prefixes.pages import PrefixKVPool, tenant_in
from topkv_prefixes.places import PagePlaces, fingerprint_of
from topkv_prefixes.settings import ANYBODY, PrefixSettings
from topkv_prefixes.storage import StorageSetup

READERS, WRITERS = max(2, min(8, (os.cpu_count() or 2) // 2)), 1
"""Threads that read and write. One copies 2 to 5 GB a second from the system's page cache."""

REMEMBERED = 1 << 18
"""Most keys that are known to be stored, and most that were seen once."""

POLL_S = 0.1
"""Seconds between two checks, while somebody waits, whether a call hangs."""


def check_quotas(quotas: Mapping[str, int], page: int) -> None:
    """Raise ConfigError where a quota has no room for a stored page of N bytes."""
    small = [
        f"quotas: {tenant!r} must be at least a stored page, {page} bytes, got {size}"
        for tenant, size in quotas.items()
        if size < page
    ]
    if small:
        raise ConfigError("a storage would keep nothing", small)


def quotas_by_owner(quotas: Mapping[str, int]) -> Callable[[bytes], int | None]:
    """Return a function of the bytes that an owner may have in a storage, from tenants' quotas."""
    named = {owner_of(tenant): size for tenant, size in quotas.items() if tenant != ANYBODY}
    return lambda owner: named.get(owner, quotas.get(ANYBODY))


class StorageTier:
    """Stores pages, and fetches them.

    Args:
        manager: the memory of both tiers.
        host: its host pool.
        kept: the parameters of ``prefixes``, with a storage.
        registry: where the storage is found.

    Attributes:
        counts: counts of the storage so far.
        epoch: goes into all keys, so that with another one nothing stored before is found.
    """

    def __init__(
        self,
        manager: SparseKVCacheManager,
        host: PrefixKVPool,
        kept: PrefixSettings,
        registry: PluginRegistry,
    ) -> None:
        settings = kept.storage
        if settings is None:
            raise TypeError("a tier needs a storage, and the parameters of prefixes name none")
        self._manager, self._host, self._settings = manager, host, settings
        self._places = places = PagePlaces(manager)
        fingerprint = fingerprint_of(manager.config, manager, kept.keep)
        quota_of = None
        if settings.quotas:
            check_quotas(settings.quotas, places.object_bytes)
            quota_of = quotas_by_owner(settings.quotas)
        setup = StorageSetup(settings.params, places.object_bytes, places.pool, quota_of)
        who = registry.get("storage", settings.name).who
        self._storage = registry.create("storage", settings.name, setup)
        self._calls = Calls(self._storage, settings.limit_s, who)
        self._readers, self._writers = (
            Workers(count, self._calls.failed) for count in (READERS, WRITERS)
        )
        self._shared = Shared(manager, host, places, self._calls, self._readers, fingerprint)
        self._stored: OrderedDict[bytes, None] = OrderedDict()
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._under_way: dict[bytes, Fetch] = {}
        self._stopped: list[Fetch] = []
        self._queued, self._closed = 0, False
        self.epoch = b""
        for workers in (self._readers, self._writers):
            weakref.finalize(self, workers.close)

    @property
    def counts(self) -> StorageCounts:
        return self._calls.counts

    @property
    def reason(self) -> str | None:
        """The last failure, for people; None if nothing failed."""
        return self._calls.reason

    # From the storage to prompts.

    @contextmanager
    def bring(self, names: Sequence[bytes]) -> Iterator[None]:
        """Bring the pages of a prompt to the host pool, as many as the policy waits for.

        Args:
            names: keys of its pages in the host pool. Pages that are there stay meanwhile.
        """
        self.tidy()
        fetch = self._joined(names)
        if fetch is None:
            yield
            return
        try:
            self._wait(fetch)
            yield
        finally:
            self._end(fetch)

    def prefetch(self, names: Sequence[bytes]) -> None:
        """Begin to bring the pages of a prompt, at most half of the room that is left."""
        self.tidy()
        fetch = self._joined(names, self._host.free // 2)
        if fetch is not None:
            self._under_way[fetch.names[0]] = fetch
            fetch.advance()

    def tidy(self) -> int:
        """Publish pages that came; return the number of prompts whose pages are on their way."""
        for name, fetch in list(self._under_way.items()):
            if fetch.advance():
                del self._under_way[name]
                self._end(fetch)
        self._stopped = [fetch for fetch in self._stopped if not fetch.tidy()]
        return len(self._under_way)

    def _end(self, fetch: Fetch) -> None:
        """Count the pages that a fetch has brought, and let them go."""
        self._calls.counts.found += fetch.landed * self._manager.config.page_tokens
        for key in fetch.keys[: fetch.landed]:
            self._remember(self._stored, key)
        for key in fetch.keys[fetch.landed :]:  # others may have let it go
            self._stored.pop(key, None)
        fetch.release()
        self._stopped.append(fetch)
        self._stopped = [each for each in self._stopped if not each.tidy()]

    def _joined(self, names: Sequence[bytes], most: int | None = None) -> Fetch | None:
        """Return the fetch that is under way for these pages, or a new one; None if not needed."""
        found = self._host.find(names)
        missing = names[len(found) :]
        tokens = len(missing) * self._manager.config.page_tokens
        if tokens < max(1, self._settings.least_tokens) or not self._calls.available:
            return None
        if missing[0] in self._under_way:
            fetch = self._under_way.pop(missing[0])
            fetch.most = len(fetch.keys) if most is None else most
            return fetch
        keys = self._keys(missing)
        most = len(keys) if most is None else most
        fetch = Fetch(self._shared, keys, missing, most)
        fetch.hold(found)
        fetch.begin()
        return fetch

    def _wait(self, fetch: Fetch) -> None:
        settings, asked = self._settings, len(fetch.keys) * self._manager.config.page_tokens
        until = time.monotonic() + {
            "wait_complete": math.inf,
            "best_effort": 0.0,
            "timeout": settings.wait_s + settings.wait_s_per_1k * asked / 1024,
        }.get(settings.fetch, 0.0)
        changed = self._calls.changed
        while not fetch.advance(AT_ONCE):
            left = until - time.monotonic()
            if left <= 0 or not self._calls.available:
                self._calls.counts.late += 1
                break
            with changed:
                changed.wait_for(lambda: fetch.news, min(left, POLL_S))

    # From the host pool to the storage.

    def published(self, pages: Sequence[int], names: Sequence[bytes]) -> None:
        """Store pages that were published or found again, if the policy wants that."""
        self.tidy()
        if self._settings.write == "write_back":
            return
        chosen = list(zip(pages, names, strict=False))
        if self._settings.write == "write_through_selective":
            chosen = [(page, name) for page, name in chosen if self._again(name)]
        self._store(chosen)

    def evicted(self, pages: Sequence[int], names: Sequence[bytes]) -> None:
        """Store pages that are about to be given out and still hold their bytes."""
        if self._settings.write == "write_back" and not self._closed:
            self._store(zip(pages, names, strict=True), whole=True)

    def _again(self, name: bytes) -> bool:
        known = name in self._seen
        self._remember(self._seen, name)
        return known

    def _store(self, chosen: Iterable[tuple[int, bytes]], whole: bool = False) -> None:
        """Have a thread store pages.

        Args:
            chosen: pages and their keys in the host pool.
            whole: copy all bytes first, for the pages are about to be written.
        """
        pairs = [(page, key) for page, name in chosen if (key := self._key(name))]
        pairs = [(page, key) for page, key in pairs if key not in self._stored]
        size = self._places.object_bytes if whole else HEADER + self._places.staged_bytes
        with self._calls.changed:
            room = max(0, byte_size(self._settings.queue) - self._queued) // size
        room = room if self._calls.available else 0
        with self._calls.changed:
            self._calls.counts.dropped += len(pairs[room:])
        pairs = pairs[:room]
        if pairs:
            self._manager.synchronize()  # copies to the host pool are under way
        # The first pages of a prompt last: a storage lets go what was stored longest ago.
        for at in reversed(range(0, len(pairs), self._shared.batch)):
            pages, keys = zip(*pairs[at : at + self._shared.batch], strict=True)
            rows = self._places.rows(len(pages))
            self._places.stage(pages, rows)
            parts = [self._places.place(*each) for each in zip(pages, rows.numpy(), strict=True)]
            written: np.ndarray | None = self._host.written[list(pages)]
            if whole:
                parts = [[np.concatenate(place)] for place in parts]
                parts = [[place[:HEADER], place[HEADER:]] for (place,) in parts]
                written = None
            for key in keys:
                self._remember(self._stored, key)
            with self._calls.changed:
                self._queued += size * len(pages)
            self._writers.add(
                partial(self._put, list(pages), list(keys), parts, written, size * len(pages))
            )

    def _put(
        self,
        pages: list[int],
        keys: list[bytes],
        places: list[list[np.ndarray]],
        written: np.ndarray | None,
        queued: int,
    ) -> None:
        """Store a batch, in another thread. A page that is written meanwhile is given up."""
        done, counts = [False] * len(keys), self._calls.counts
        try:
            for key, (header, *body) in zip(keys, places, strict=True):
                write_header(header, key, self._shared.fingerprint, body)
            # The checksum is that of the page only if nobody wrote it until here.
            kept = self._unwritten(pages, written)
            answers = self._calls(
                "put",
                [key for key, right in zip(keys, kept, strict=True) if right],
                [place for place, right in zip(places, kept, strict=True) if right],
            )
            stored = iter(answers or ())
            done = [right and next(stored, False) for right in kept]
            torn = [
                key
                for key, was, now in zip(keys, done, self._unwritten(pages, written), strict=True)
                if was and not now
            ]
            if torn:
                self._calls("delete", torn)
                done = [was and key not in torn for key, was in zip(keys, done, strict=True)]
        finally:
            with self._calls.changed:
                self._queued -= queued
                counts.stored += sum(done)
                counts.stored_bytes += sum(done) * self._places.object_bytes
                counts.dropped += len(done) - sum(done)
                for key, was in zip(keys, done, strict=True):
                    if not was:
                        self._stored.pop(key, None)
                self._calls.changed.notify_all()

    def _unwritten(self, pages: list[int], written: np.ndarray | None) -> list[bool]:
        if written is None:
            return [True] * len(pages)
        same: list[bool] = (self._host.written[pages] == written).tolist()
        return same

    def _remember(self, among: OrderedDict[bytes, None], key: bytes) -> None:
        with self._calls.changed:
            among[key] = None
            among.move_to_end(key)
            if len(among) > REMEMBERED:
                among.popitem(last=False)

    def _key(self, name: bytes) -> bytes:
        """Return the key of a stored page: its owner, and a hash of all that it depends on."""
        owner = owner_of(tenant_in(name).decode())
        rest = hashlib.sha256(self._shared.fingerprint + self.epoch + name).digest()
        return owner + rest[len(owner) :]

    def _keys(self, names: Sequence[bytes]) -> list[bytes]:
        return [self._key(name) for name in names]

    # The end.

    def give_way(self) -> None:
        """Stop prefetches, because pages are missing."""
        while self._under_way:
            self._end(self._under_way.popitem()[1])

    def wait(self) -> None:
        """Wait until all pages that were to be stored are, or the storage is left alone."""
        while self._writers.left and self._calls.available:
            with self._calls.changed:
                self._calls.changed.wait(0.01)

    def close(self) -> None:
        """Store the pages that are left to store, and let go of the storage. Idempotent.

        A call that hangs is left behind with its memory, which stays as long as it does. A child
        of a fork leaves the storage to its parent.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._settings.write == "write_back":
                self._store([(page, name) for name, page in self._host.published().items()])
            self.wait()
        finally:
            for workers in (self._readers, self._writers):
                workers.close()
            self.give_way()
            self._let_go()

    def _let_go(self) -> None:
        """Close the storage, on a thread too, and warn if that fails or hangs."""
        hung, failed = self._hung(self._readers, self._writers), self.counts.failed
        if not hung and not self._calls.forked:
            closer = Workers(1, self._calls.failed)
            closer.add(partial(self._calls, "close"))
            hung = self._hung(closer)
            closer.close()
        problem = None
        if hung:
            problem = f"storage {self._settings.name!r}: {hung} calls hang and are left behind"
        elif self.counts.failed > failed:
            problem = f"{self.reason}; what it holds of this process may be left behind"
        if problem:
            warnings.warn(problem, RuntimeWarning, stacklevel=3)

    def _hung(self, *workers: Workers) -> int:
        """Count the jobs that do not end."""
        until = time.monotonic() + self._settings.limit_s
        while (left := sum(each.left for each in workers)) and time.monotonic() < until:
            time.sleep(0.001)
        return left
