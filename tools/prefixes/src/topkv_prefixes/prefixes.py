"""Prompts that begin like earlier ones: a request takes over the pages that another left behind.

A page depends on its tokens and all tokens before them, and is found by these
(``topkv_prefixes.pages``). Engines call ``Prefixes`` between forwards:

    coordinator = SparseCoordinator(config)  # with ``pages: prefixes``
    slot = coordinator.keeper.begin(tokens)
    ...  # append tokens[coordinator.length(slot):], decode
    coordinator.keeper.publish(slot, tokens)
    coordinator.request_end(slot)

Only whole pages are found. A request that takes them over goes on as one that has appended their
tokens itself in the same chunks, to the bit.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import numpy as np

from topkv.coordinator import SparseCoordinator
from topkv.errors import RequestError
from topkv.hooks.keeper import KeeperSetup
from topkv.messages import shown
from topkv.plugins.discovery import hookimpl
from topkv_prefixes.counts import PrefixCounts, TenantCounts
from topkv_prefixes.pages import PrefixKVPool, page_keys, tenant_in
from topkv_prefixes.settings import ANYBODY, PrefixSettings, is_text
from topkv_prefixes.tier import StorageTier

Tokens = Sequence[int] | np.ndarray
"""Ids of a request from position 0 on. For input that is no text an engine may give ids outside of
the model's vocabulary, as long as equal ids mean equal keys and values."""

IDLE_TENANTS = 32
"""Tenants without kept pages whose counts are remembered, beside those of running requests."""


class Prefixes:
    """Finds and publishes the pages of prompts. Cold.

    Observers see ``counts`` under the name ``prefixes``.

    Args:
        coordinator: whose requests these are.
        host: its host pool.
        settings: the parameters of ``prefixes``.

    Attributes:
        settings: the parameters.
        storage: the tier below host memory; None if there is none.
        off: every reason why nothing is found and nothing published; empty where pages are.
        tail: last tokens of a prompt that are computed all the same.
    """

    def __init__(
        self, coordinator: SparseCoordinator, host: PrefixKVPool, settings: PrefixSettings
    ) -> None:
        specs, self.settings = coordinator.specs, settings
        self.requests = requests = coordinator.requests
        self.tail = max([1, *(spec.prompt_tail for spec in specs if spec)])
        keeping = [
            str(group.algorithm)
            for group, spec in zip(requests.config.groups, specs, strict=True)
            if spec and spec.prefix != "pages"
        ]
        self.off = [
            f"{name} keeps more of a prompt than what stands in its pages"
            for name in dict.fromkeys(keeping)
        ]
        self._recent: OrderedDict[str, None] = OrderedDict()  # tenants, the latest last
        self._tenant: ContextVar[str] = ContextVar("tenant", default="")
        self._host = host
        host.on_evict, host.limit_of = self._evicted, self._limit_of
        self._page_bytes = host.bytes.numel() // host.num_pages
        self._counts, self.storage = PrefixCounts(), None
        if settings.storage and not self.off:
            self.storage = StorageTier(requests.manager, host, settings, coordinator.registry)
            self._counts.storage = self.storage.counts
            host.on_close, host.on_short = self.storage.close, self.storage.give_way
        coordinator.observers.counts["prefixes"] = lambda: self.counts

    @property
    def counts(self) -> PrefixCounts:
        """Counters so far, and pages that are kept now."""
        if not self.off:
            self._counts.kept, self._counts.evicted = self._host.kept, self._host.evicted
            for name, each in list(self._counts.tenants.items()):  # any thread may look
                each.kept = self._host.kept_for(name.encode())
                each.kept_bytes = each.kept * self._page_bytes
        return self._counts

    def tenant(self, name: str) -> AbstractContextManager[None]:
        """Attribute prompts of this thread or task meanwhile to a tenant.

        They find pages of the same tenant alone. Pages that are kept for it stay within its quota,
        see the parameter ``quotas``; pages that its requests hold are not counted.

        Args:
            name: name of the tenant; "" for none.

        Raises:
            RequestError: the name is no text, or one that UTF-8 does not have.
        """
        if not is_text(name):
            raise RequestError(
                f"a tenant must be a text that UTF-8 has, '' for none, got {shown(name)}; name "
                "whom the prompts are of"
            )
        return self._as(name)

    @contextmanager
    def _as(self, name: str) -> Iterator[None]:
        before = self._tenant.set(name)
        try:
            yield
        finally:
            self._tenant.reset(before)

    def length(self, tokens: Tokens, salt: bytes = b"") -> int:
        """Count the tokens that a request would take over: whole pages, never all tokens.

        Args:
            tokens: tokens of the prompt.
            salt: anything else that keys and values depend on: adapters, weights.
        """
        return len(self._find(tokens, salt)) * self.requests.config.page_tokens

    def begin(self, tokens: Tokens, salt: bytes = b"", most: int | None = None) -> int:
        """Take a request slot for a prompt, with the pages that are found.

        Args:
            tokens, salt: as of ``length``.
            most: no page behind these first tokens; all that are found by default. An engine that
                cannot go on at the end of a page truncates the request then.

        Returns:
            The slot. Its length says how many tokens it has.

        Raises:
            DeviceMemoryError, HostMemoryError: no room; nothing has changed.
        """
        page, keys = self.requests.config.page_tokens, self._keys(tokens, salt)
        keys = keys if most is None else keys[: -(-most // page)]
        with self._brought(keys):
            pages = [] if self.off else self._host.find(keys)
            slot = self.requests.begin(pages, len(pages) * page)
        for counts in (self._counts, self._counts_of(self._tenant.get())):
            counts.asked += len(tokens)
            counts.found += len(pages) * page
        if self.storage:
            self.storage.published(pages, keys)
        return slot

    def fetch(self, tokens: Tokens, salt: bytes = b"") -> None:
        """Bring pages of a prompt from a storage to host memory, as ``begin`` does too.

        Waits as long as the parameter ``storage`` says. Without a storage nothing happens.
        """
        with self._brought(self._keys(tokens, salt)):
            pass

    def prefetch(self, tokens: Tokens, salt: bytes = b"") -> None:
        """Begin to fetch the pages of a prompt, and wait for nothing. ``begin`` joins in."""
        if self.storage:
            self.storage.prefetch(self._keys(tokens, salt))

    def poll(self) -> int:
        """Take prefetched pages that have come, between forwards, and return for how many prompts
        more pages are to come."""
        return self.storage.tidy() if self.storage else 0

    def publish(self, slot: int, tokens: Tokens, salt: bytes = b"") -> None:
        """Let others find the full pages of a request.

        Args:
            slot: slot of the request, which goes on as before.
            tokens: its first tokens; no page behind them is published.
            salt: as of ``length``.

        Raises:
            RequestError: the request has fewer tokens.
        """
        self.requests.check(slot)
        length = int(self.requests.length[slot])
        if len(tokens) > length:
            raise RequestError(
                f"slot {slot} holds {length} tokens, and {len(tokens)} were to be published; pass "
                "those that it holds"
            )
        if self.off:
            return
        # The host lacks nothing but tokens of an open unit, and full pages have none.
        keys = self._keys_of(tokens, salt)
        pages = self.requests.pages.of(slot)
        self._host.publish(pages, keys)
        if self.storage:
            self.storage.published(self._host.find(keys), keys)

    def forget(self, stored: bool = True) -> None:
        """Let nothing be found that was published so far, after weights have changed say.

        Args:
            stored: forget the pages of a storage too. Not needed with a salt for each set of
                weights, which finds only pages of its own.
        """
        if not self.off:
            self.requests.manager.poison(self._host.forget())
        if self.storage and stored:
            self.storage.epoch = os.urandom(16)

    def _find(self, tokens: Tokens, salt: bytes) -> list[int]:
        return [] if self.off else self._host.find(self._keys(tokens, salt))

    def _keys(self, tokens: Tokens, salt: bytes) -> list[bytes]:
        """Make the keys of a prompt's pages that may be found."""
        if self.off:
            return []
        known = tokens[: max(0, len(tokens) - self.tail)]
        return self._keys_of(known, salt)

    def _keys_of(self, tokens: Tokens, salt: bytes) -> list[bytes]:
        """Make the keys of all full pages, each with the tenant: nobody else finds these."""
        tenant = self._tenant.get().encode()
        keys = page_keys(tokens, self.requests.config.page_tokens, salt)
        return [key + tenant for key in keys]

    def _counts_of(self, tenant: str) -> TenantCounts:
        """Return the counters of a tenant. Of tenants that keep nothing, the ones that asked
        longest ago are forgotten."""
        known, recent = self._counts.tenants, self._recent
        counts = known.setdefault(tenant, TenantCounts())
        recent[tenant] = None
        recent.move_to_end(tenant)
        idle = IDLE_TENANTS + self.requests.config.max_requests
        keeping = 0 if self.off else self._host.tenants
        while len(known) > idle + keeping:
            oldest = next(iter(recent))
            if not self.off and self._host.kept_for(oldest.encode()):
                recent.move_to_end(oldest)
            else:
                del recent[oldest], known[oldest]
        return counts

    def _limit_of(self, tenant: bytes) -> int | None:
        quotas = self.settings.quotas or {}
        quota = quotas.get(tenant.decode(), quotas.get(ANYBODY))
        return None if quota is None else quota // self._page_bytes

    def _brought(self, keys: list[bytes]) -> AbstractContextManager[None]:
        return self.storage.bring(keys) if self.storage else nullcontext()

    def _evicted(self, pages: list[int], keys: list[bytes]) -> None:
        if self.storage:
            self.storage.evicted(pages, keys)
        for key in keys:
            self._counts_of(tenant_in(key).decode()).evicted += 1
        self.requests.manager.poison(pages)


class PrefixKeeper:
    """The contract is ``topkv.hooks.keeper``: makes the ``Prefixes`` of a coordinator.

    Args:
        setup: the configuration, and the parameters, a ``PrefixSettings``.
    """

    def __init__(self, setup: KeeperSetup) -> None:
        self.settings: PrefixSettings = setup.params

    @hookimpl
    def host_pool(self) -> type[PrefixKVPool]:
        return PrefixKVPool

    @hookimpl
    def bind(self, coordinator: SparseCoordinator) -> Prefixes:
        host = coordinator.manager.host
        assert isinstance(host, PrefixKVPool)  # as ``host_pool`` says
        return Prefixes(coordinator, host, self.settings)
