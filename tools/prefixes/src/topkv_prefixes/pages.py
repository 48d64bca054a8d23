"""Pages that outlive their requests, found again by the tokens that they hold.

A page that is full can be published under a key, a hash over its tokens and all before them, so
that equal keys mean equal prefixes. When its last request lets go of it, it is kept: it counts as
free, and is given out like a free page when no other is left, the one that went unused longest
first. Until then a request that begins with the same tokens can hold it again.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from topkv.kv.host_pool import HostKVPool, PageAllocator


def page_keys(tokens: Sequence[int] | np.ndarray, page_tokens: int, salt: bytes) -> list[bytes]:
    """Make a key for each full page of ``tokens``: SHA-256 over its ids and the key before.

    Args:
        tokens: ids from position 0 on.
        page_tokens: tokens of a page.
        salt: anything else that keys and values depend on; begins the chain.
    """
    ids = np.ascontiguousarray(tokens, dtype="<i8")
    key, keys = hashlib.sha256(b"topkv-page-1" + salt).digest(), []
    for page in ids[: len(ids) // page_tokens * page_tokens].reshape(-1, page_tokens):
        key = hashlib.sha256(key + page.tobytes()).digest()
        keys.append(key)
    return keys


def tenant_in(key: bytes) -> bytes:
    """Return the tenant whom a page is kept for: the name behind the hash, if any."""
    return key[hashlib.sha256().digest_size :]


class PrefixPages(PageAllocator):
    """Page ids, of which published ones are kept when nobody holds them.

    A tenant for whom more are kept than its limit loses its own, the ones that went unused longest
    first, and nobody else's. What requests hold counts for nobody.

    Args:
        arguments: arguments of the allocator that this class extends, see ``PrefixKVPool``.

    Attributes:
        on_evict: called with the pages that are about to be given out and were kept until then,
            and their keys.
        tenant_of: returns the tenant of a key.
        limit_of: returns the most pages that are kept for a tenant; None for any number.
        on_short: called when fewer pages are free than are asked for; may give some back.
        evicted: pages that were kept and given out.
        written: int64 ``[num_pages]`` how often a page was withdrawn. As long as that stays, the
            bytes of a published page do; any thread may look.
        lent: pages that are held and that no request holds.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.on_evict: Callable[[list[int], list[bytes]], None] = lambda pages, keys: None
        self.tenant_of: Callable[[bytes], bytes] = tenant_in
        self.limit_of: Callable[[bytes], int | None] = lambda tenant: None
        self.on_short: Callable[[], None] = lambda: None
        self.evicted = 0
        self.written = np.zeros(self.num_pages, dtype=np.int64)
        self.lent: list[int] = []
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # those without holders, oldest first
        self._kept_for: defaultdict[bytes, OrderedDict[int, None]] = defaultdict(OrderedDict)

    @property
    def free(self) -> int:
        """Pages that ``lease`` would give: those that hold nothing, and those that are kept."""
        return len(self._free) + len(self._kept)

    @property
    def kept(self) -> int:
        """Published pages that nobody holds."""
        return len(self._kept)

    @property
    def tenants(self) -> int:
        """Number of tenants for whom pages are kept."""
        return len(self._kept_for)

    def kept_for(self, tenant: bytes) -> int:
        """Count the pages that are kept for a tenant."""
        return len(self._kept_for.get(tenant, ()))

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the pages of the first keys, up to the first key without one."""
        pages: list[int] = []
        for key in keys:
            if key not in self._page_of:
                break
            pages.append(self._page_of[key])
        return pages

    def publish(self, pages: Iterable[int], keys: Iterable[bytes]) -> None:
        """Let pages be found by their keys; the first of pages with equal keys is found.

        Args:
            pages: leased ones, full, whose every copy to the host is under way. Nobody writes
                them any more, see ``withdraw``.
            keys: of ``page_keys``, no more than pages.
        """
        for page, key in zip(pages, keys, strict=False):
            self._check_leased(page)
            if key not in self._page_of and page not in self._key_of:
                self._page_of[key], self._key_of[page] = page, key

    def withdraw(self, pages: Iterable[int]) -> None:
        """Let pages be found no more, before the only holder of one writes it."""
        for page in pages:
            if page in self._kept:
                self._hold(page)
                self._free.append(page)
            key = self._key_of.pop(page, None)
            if key is not None:
                self.written[page] += 1
                del self._page_of[key]

    def forget(self) -> list[int]:
        """Withdraw every page, and return those that were kept, which are free now."""
        kept = list(self._kept)
        self.withdraw(list(self._key_of))
        return kept

    def lease(self, count: int) -> list[int]:
        """Lease as ``PageAllocator``; pages that are kept go when no others are left."""
        if count > self.free:
            self.on_short()
        missing = count - len(self._free)
        if 0 < missing <= len(self._kept):
            self._evict(list(islice(self._kept, missing)))
        return super().lease(count)

    def release(self, pages: Iterable[int]) -> list[int]:
        """Release as ``PageAllocator``; the result holds neither pages that are kept, nor pages
        that a tenant loses for them, with which ``on_evict`` is called."""
        pages = list(pages)
        tenants = {self.tenant_of(self._key_of[page]) for page in pages if page in self._key_of}
        # The last ones first, so that no page goes before those that can only be found by it.
        freed = super().release(reversed(pages))
        for tenant in sorted(tenants):
            limit, kept = self.limit_of(tenant), self.kept_for(tenant)
            if limit is not None and kept > limit:
                self._evict(list(islice(self._kept_for[tenant], kept - limit)))
        return freed

    def _evict(self, pages: list[int]) -> None:
        """Let go of kept pages."""
        keys = [self._key_of[page] for page in pages]
        self.withdraw(pages)
        self.evicted += len(pages)
        self.on_evict(pages, keys)

    def _give_back(self, page: int) -> bool:
        if page not in self._key_of:
            return super()._give_back(page)
        self._kept[page] = self._kept_for[self.tenant_of(self._key_of[page])][page] = None
        return False

    def _hold(self, page: int) -> None:
        """Stop keeping a page, which somebody holds now."""
        tenant = self.tenant_of(self._key_of[page])
        del self._kept[page], self._kept_for[tenant][page]
        if not self._kept_for[tenant]:
            del self._kept_for[tenant]

    def _check_shareable(self, page: int) -> None:
        if page not in self._kept:
            super()._check_shareable(page)

    def share(self, pages: Iterable[int]) -> None:
        """Share as ``PageAllocator``; pages that are kept can be held again."""
        pages = list(pages)
        super().share(pages)
        for page in pages:
            if page in self._kept:
                self._hold(page)

    def published(self) -> dict[bytes, int]:
        """Return every page that can be found, by its key."""
        return dict(self._page_of)

    def lend(self, pages: Iterable[int]) -> None:
        """Mark pages that were leased or shared for somebody else than a request."""
        self.lent.extend(pages)

    def take_back(self, pages: Iterable[int]) -> list[int]:
        """Release pages that were lent, and return those that are free now."""
        pages = list(pages)
        for page in pages:
            self.lent.remove(page)
        return self.release(pages)


class PrefixKVPool(PrefixPages, HostKVPool):
    """A host pool that keeps published pages.

    Attributes:
        on_close: called before the memory is unregistered.
    """

    on_close: Callable[[], None] | None = None

    def close(self) -> None:
        """Call ``on_close``, then close as ``HostKVPool``."""
        try:
            if self.on_close is not None:
                self.on_close()
        finally:
            super().close()
