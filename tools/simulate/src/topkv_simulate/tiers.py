"""Replay of a trace of requests over two tiers: pages in host memory, and a storage below.

The host tier is the project's own, ``PrefixPages`` under ``PageTable``, without the bytes. Pages
go to the storage and come from there as in ``topkv_prefixes.tier`` with ``fetch: wait_complete``,
one call behind the other, and the storage makes room as ``topkv-files`` does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from attrs import define, field, frozen

from topkv.errors import HostMemoryError
from topkv.requests.pages import PageTable
from topkv_prefixes.fetching import AT_ONCE, BATCH_BYTES, MOST_PAGES
from topkv_prefixes.pages import PrefixPages
from topkv_prefixes.settings import WRITES
from topkv_prefixes.tier import REMEMBERED
from topkv_simulate.asked import DOES, Asked, AskedError

MOST_HOST_PAGES = 1 << 26
"""Most pages of a host pool: a list of them takes 2.5 GB."""

LEFT = 0.9
"""Share of its limit that a storage still holds once it has made room."""


@frozen
class Sizes:
    """Sizes of two tiers.

    Attributes:
        host: bytes of the host pool.
        storage: bytes of the storage; 0 where there is none.
        write: when pages go there, one of ``WRITES``.
        least_tokens: the storage is not asked for fewer tokens.
    """

    host: int
    storage: int = 0
    write: str = WRITES[0]
    least_tokens: int = 256


@define
class Counts:
    """Tokens that were found, and pages that went to and from the storage.

    Attributes:
        asked: tokens of each prompt.
        host, stored: tokens of each prompt that were in host memory, and that came from the
            storage.
        fetched: pages that came from the storage, taken over by a request or not.
        written: pages that the storage took.
        dropped: pages that the storage had no room for, even while they came.
        evicted: pages that were kept in host memory and given out again.
        removed: pages that the storage let go.
    """

    asked: list[int] = field(factory=list)
    host: list[int] = field(factory=list)
    stored: list[int] = field(factory=list)
    fetched: int = 0
    written: int = 0
    dropped: int = 0
    evicted: int = 0
    removed: int = 0


class Stored:
    """Pages of a storage, which keeps its limit as ``topkv-files`` does.

    Args:
        limit: bytes that it has room for.
        size: bytes of a page.
        counts: counts that it adds to.
    """

    def __init__(self, limit: int, size: int, counts: Counts) -> None:
        self.limit, self.size, self.counts = limit, size, counts
        self.held: OrderedDict[Any, None] = OrderedDict()  # longest unused first

    def exists(self, keys: Sequence[Any]) -> int:
        """Count the first keys that are there, and mark them as used now."""
        found = self.get(keys)
        self._touch(keys[:found])
        return found

    def get(self, keys: Sequence[Any]) -> int:
        """Count the first keys that are there."""
        for count, key in enumerate(keys):
            if key not in self.held:
                return count
        return len(keys)

    def put(self, keys: Sequence[Any]) -> list[bool]:
        """Take keys, make room, and return which of them are there then."""
        self._touch(keys)
        if len(self.held) * self.size > self.limit:
            while self.held and len(self.held) * self.size > self._low():
                self.held.popitem(last=False)
                self.counts.removed += 1
        return [key in self.held for key in keys]

    def _low(self) -> int:
        """Return the bytes to shrink to; a last object may have the whole limit."""
        return self.limit if len(self.held) == 1 else int(LEFT * self.limit)

    def _touch(self, keys: Sequence[Any]) -> None:
        for key in reversed(keys):  # a page is found by those before it
            self.held[key] = None
            self.held.move_to_end(key)


class Tiers:
    """Host pool and storage, run through a trace.

    Args:
        asked: the trace.
        sizes: of both tiers.

    Attributes:
        counts: counts so far.

    Raises:
        AskedError: the host pool has no page, or it or the trace is too large to replay.
    """

    def __init__(self, asked: Asked, sizes: Sizes) -> None:
        self.asked, self.sizes, self.counts = asked, sizes, Counts()
        pages = pages_in(asked, sizes.host)
        if pages < 2:
            raise AskedError("the host tier is too small", [_reason(sizes, "it holds no page")])
        if pages > MOST_HOST_PAGES:
            reason = f"host of {sizes.host / 1e9:g} GB: it has {pages} pages, expected at most "
            reason += f"{MOST_HOST_PAGES}; take less, or larger pages"
            raise AskedError("the host tier is too large to replay", [reason])
        self.host: Any = PrefixPages(pages)  # whose keys are numbers here
        self.host.on_evict, self.host.tenant_of = self._evicted, lambda name: b""
        config: Any = SimpleNamespace(
            max_queries=1,
            page_tokens=asked.page_tokens,
            # One that is longer than the pool does not fit, however long it is.
            max_request_tokens=min(-(-asked.longest // asked.page_tokens), pages)
            * asked.page_tokens,
            max_requests=asked.slots,
        )
        manager: Any = SimpleNamespace(
            host=self.host, poison=lambda pages: None, copy_page=lambda source, copy: None
        )
        step: Any = None  # nothing is uploaded
        try:
            self.pages = PageTable(config, manager, step)
        except (MemoryError, ValueError) as error:
            size = f"{asked.slots} requests of {config.max_request_tokens} tokens"
            reason = f"{size} are more than can be listed"
            raise AskedError("the trace is too large to replay", [reason]) from error
        stored = Stored(sizes.storage, asked.object_bytes, self.counts)
        self.storage = stored if sizes.storage else None
        self.batch = min(MOST_PAGES, max(1, BATCH_BYTES // asked.object_bytes))
        self._reported: OrderedDict[Any, None] = OrderedDict()  # believed to be in the storage
        self._seen: OrderedDict[Any, None] = OrderedDict()
        self._fetched: set[int] = set()
        self._epoch = 0
        self._does: dict[str, Callable[..., None]] = {
            DOES.FETCH: lambda tokens, names: self._release(self._bring(names)),
            DOES.BEGIN: self._begin,
            DOES.LEASE: self._lease,
            DOES.COPY: self.pages.own_page,
            DOES.FORK: lambda slot, of, count: self.pages.add(slot, self.pages.of(of)[:count]),
            DOES.CUT: lambda slot, at: self.host.withdraw(self.pages.of(slot)[at:]),
            DOES.SHRINK: self.pages.shrink,
            DOES.PUBLISH: self._publish,
            DOES.FORGET: self._forget,
        }

    def run(self) -> Counts:
        """Replay all events, and return the counts.

        Raises:
            AskedError: requests that ran at a time do not fit into the host tier together.
        """
        for event in self.asked.events:
            try:
                self._does[event[0]](*event[1:])
            except HostMemoryError as error:
                need = f"prompt {len(self.counts.asked)} of the trace does not fit: {error}"
                reason = _reason(self.sizes, need)
                raise AskedError("the host tier is too small", [reason]) from error
        self.counts.evicted = self.host.evicted
        return self.counts

    # Calls of requests, as in ``topkv_prefixes.prefixes``.

    def _begin(self, slot: int, tokens: int, names: Sequence[int]) -> None:
        held = self._bring(names)
        pages = self.host.find(names)
        self.pages.add(slot, pages)
        self._release(held)
        page, counts = self.asked.page_tokens, self.counts
        stored = self._fetched.intersection(names[: len(pages)])
        self._fetched -= stored
        counts.asked.append(tokens)
        counts.stored.append(len(stored) * page)
        counts.host.append((len(pages) - len(stored)) * page)
        self._published(names[: len(pages)])

    def _lease(self, spare: int, needs: Sequence[tuple[int, int]]) -> None:
        self.pages.lease(needs, spare)

    def _publish(self, slot: int, names: Sequence[int]) -> None:
        self.host.publish(self.pages.of(slot), names)
        self._published(names[: len(self.host.find(names))])

    def _forget(self, stored: int) -> None:
        self.host.forget()
        self._fetched.clear()
        self._epoch += stored

    # Pages between the tiers, as in ``topkv_prefixes.tier``.

    def _bring(self, names: Sequence[int]) -> list[int]:
        """Fetch pages that the host lacks; return pages that are held until ``_release``."""
        if self.storage is None:
            return []
        found = self.host.find(names)
        missing = names[len(found) :]
        least = max(1, self.sizes.least_tokens)
        if len(missing) * self.asked.page_tokens < least:
            return []
        keys = self._keys(missing)
        self.host.share(found)
        held, landed, count = [*found], 0, self.storage.exists(keys)
        at, whole = 0, True
        while whole and at < count and self.host.free:
            batches = []
            for _ in range(AT_ONCE):
                size = min(self.batch, count - at, self.host.free)
                if size:
                    leased = self.host.lease(size)
                    batches.append((at, leased, self.storage.get(keys[at : at + size])))
                    at += size
            for first, leased, right in batches:
                held += leased
                if whole:
                    self.host.publish(leased[:right], missing[first : first + right])
                    self._fetched.update(missing[first : first + right])
                    landed += right
                    whole = right == len(leased)
        self.counts.fetched += landed
        for key in keys[:landed]:
            _remember(self._reported, key)
        for key in keys[landed:]:
            self._reported.pop(key, None)
        return held

    def _release(self, held: Sequence[int]) -> None:
        self.host.release(held)

    def _published(self, names: Sequence[int]) -> None:
        if self.storage is None or self.sizes.write == "write_back":
            return
        keys = self._keys(names)
        if self.sizes.write == "write_through_selective":
            # Order matters: a key is forgotten when others are seen.
            keys = [key for name, key in zip(names, keys, strict=True) if self._again(name)]
        self._store(keys)

    def _again(self, name: int) -> bool:
        known = name in self._seen
        _remember(self._seen, name)
        return known

    def _evicted(self, pages: list[int], names: list[Any]) -> None:
        self._fetched.difference_update(names)
        if self.storage is not None and self.sizes.write == "write_back":
            self._store(self._keys(names))

    def _store(self, keys: Iterable[Any]) -> None:
        if self.storage is None:
            return
        new = [key for key in keys if key not in self._reported]
        for at in reversed(range(0, len(new), self.batch)):
            some = new[at : at + self.batch]
            for key in some:
                _remember(self._reported, key)
            done = self.storage.put(some)
            for key, there in zip(some, done, strict=True):
                if not there:
                    self._reported.pop(key, None)
            self.counts.written += sum(done)
            self.counts.dropped += len(some) - sum(done)

    def _keys(self, names: Iterable[int]) -> list[tuple[int, int]]:
        return [(self._epoch, name) for name in names]


def pages_in(asked: Asked, host: int) -> int:
    """Return the pages of a host pool of N bytes, page 0 included, which nobody holds."""
    return host // asked.page_bytes


def _remember(among: OrderedDict[Any, None], key: Any) -> None:
    among[key] = None
    among.move_to_end(key)
    if len(among) > REMEMBERED:
        among.popitem(last=False)


def _reason(sizes: Sizes, why: str) -> str:
    return f"host of {sizes.host / 1e9:g} GB: {why}; take more, or let fewer run at a time"
