"""Calls of engines between forwards: what may be asked, and when. Beside the decode path."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen

from topkv.assembly.assembly import Plugins, Tensors, make_plugins
from topkv.config import LoweredConfig
from topkv.decode.layers import Forward
from topkv.memory.manager import SparseKVCacheManager
from topkv.plugins import PluginRegistry
from topkv.plugins import registry as default_registry
from topkv.report import MemoryReport, TransferReport, count_transfers
from topkv.requests.checks import check_held, check_idle, check_replaced, check_reserve
from topkv.requests.requests import Requests


@frozen
class Admission:
    """Answer of ``can_admit``: truthy when there is room, else with the reasons."""

    reasons: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.reasons


class BetweenForwards:
    """Base of ``SparseCoordinator``, which makes the attributes and says what they are."""

    config: LoweredConfig
    manager: SparseKVCacheManager
    requests: Requests
    forward: Forward | None = None
    _plugins: Plugins
    _tensors: Tensors

    @classmethod
    def required_bytes(
        cls, config: LoweredConfig, registry: PluginRegistry | None = None
    ) -> MemoryReport:
        """Count the bytes that a coordinator takes; only scratch is taken. Raises as it does."""
        plugins = make_plugins(registry or default_registry(), config)
        return Tensors(config, plugins, torch.device("meta")).memory(plugins)

    def request_begin(self, pages: Sequence[int] = (), length: int = 0) -> int:
        """Take a request slot; with pages of an engine, see ``Requests.begin``."""
        check_held(self.requests, pages, length)
        return self.requests.begin(pages, length)

    def request_add_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Give a request further pages of an engine, see ``Requests.add_pages``."""
        self.requests.add_pages(slot, pages)

    def request_replace_pages(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Let a request hold other pages of an engine in place of full ones, from its page
        ``first`` on.

        An engine whose prefix cache has found the same tokens twice keeps one of both. Keys,
        values and representations of the pages are those of the same first tokens, so buffers and
        maps stay as they are. The old pages are let go.

        Raises:
            RequestError: the ids are not the engine's to give out; nothing has changed.
        """
        check_idle(self.forward, "request_replace_pages")
        check_replaced(self.requests, slot, first, pages)
        self.requests.pages.replace(slot, first, pages)

    def request_end(self, slot: int) -> None:
        """Give back everything that the request holds; also for abort.

        During a forward it takes effect at ``forward_end``: later layers still write that row.
        """
        self.requests.check(slot)
        if self.forward is None:
            self.requests.end(slot)
        elif slot not in self.forward.ending:
            self.forward.ending.append(slot)

    def length(self, slot: int) -> int:
        """Tokens of a request."""
        self.requests.check(slot)
        return int(self.requests.length[slot])

    def can_admit(self, tokens: int, requests: int = 1) -> Admission:
        """Check whether ``requests`` new requests of ``tokens`` tokens each would find room.

        What can run out are slots and pages: all else is allocated for ``max_requests`` and
        ``max_tokens`` when the coordinator is made.
        """
        held, limit, reasons = self.requests, self.config.max_request_tokens, []
        if requests > held.free:
            reasons.append(f"{requests} request slots are needed and {held.free} are free")
        if tokens > limit:
            reasons.append(f"{tokens} tokens exceed max_request_tokens = {limit}")
        pages, free = requests * held.pages.needed(tokens), self.manager.host.free
        if pages > free:
            reasons.append(f"{pages} host pages are needed and {free} are free")
        return Admission(tuple(reasons))

    def reserve(self, slot: int, tokens: int) -> None:
        """Lease the pages for ``tokens`` further tokens now.

        Raises:
            HostMemoryError: they are not to be had; the request is as it was.
            RequestError: an algorithm has no room for the tokens after the prompt.
        """
        check_idle(self.forward, "reserve")
        check_reserve(self.requests, slot, tokens)
        self.requests.pages.lease([(slot, int(self.requests.length[slot]) + tokens)])

    def rollback(self, slot: int | Sequence[int], length: int | Sequence[int]) -> None:
        """Take back the newest tokens of a request, or of several; see ``Requests.rollback``."""
        check_idle(self.forward, "rollback")
        self.requests.rollback(np.atleast_1d(slot), np.atleast_1d(length))

    def truncate(self, slot: int, length: int) -> None:
        """Cut a request to ``length`` tokens and forget every device copy. Cold."""
        check_idle(self.forward, "truncate")
        self.requests.truncate(slot, length)

    def fork(self, slot: int) -> int:
        """Begin a request with the same tokens, which shares the full pages. Cold."""
        check_idle(self.forward, "fork")
        return self.requests.fork(slot)

    def flush(self, slot: int) -> None:
        """Move the open unit to the host, so that all tokens are there. Cold."""
        check_idle(self.forward, "flush")
        self.requests.flush(slot)

    def memory(self) -> MemoryReport:
        """Count the bytes on both tiers, from tensors."""
        return self._tensors.memory(self._plugins)

    def transfers_of(self, slots: Sequence[int] | None = None) -> TransferReport:
        """Count transfers of requests since each began; of all requests for None. Synchronizes."""
        return count_transfers(self.manager.stores, slots)

    def close(self) -> None:
        """Unregister the host memory. Idempotent."""
        if "manager" in vars(self):  # it is not while a coordinator is refused
            self.manager.close()
