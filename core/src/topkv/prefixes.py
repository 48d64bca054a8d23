"""Prompts that begin like earlier ones: a request takes over the pages that another left behind.

What a page holds depends on its tokens and all before them, so that pages are found by those
(``topkv.kv.prefix``). Engines call ``Prefixes`` between forwards:

    slot = coordinator.prefixes.begin(tokens)
    ...  # append tokens[coordinator.length(slot):], decode
    coordinator.prefixes.publish(slot, tokens)
    coordinator.request_end(slot)

Only whole pages are found. A request that takes them over goes on as one that has appended their
tokens itself in the same chunks, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import define

from topkv.errors import RequestError
from topkv.hooks.algorithm import AlgorithmSpec
from topkv.kv.prefix import PrefixPages, page_keys
from topkv.requests import Requests

Tokens = Sequence[int] | np.ndarray
"""Ids of a request from position 0 on. An engine may give others than the model's vocabulary has,
for what is no text, as long as equal ids mean equal keys and values."""


@define
class PrefixCounts:
    """What was found so far.

    Attributes:
        asked, found: tokens of requests that began by their tokens, and those of them that were
            taken over.
        kept: pages that no request holds and that can be found.
        evicted: pages that were kept and given out again.
    """

    asked: int = 0
    found: int = 0
    kept: int = 0
    evicted: int = 0


class Prefixes:
    """Finds and publishes the pages of prompts. Cold.

    Args:
        requests: whose pages they are.
        specs: of the algorithms; None for dense groups.

    Attributes:
        off: every reason why nothing is found and nothing published; empty where pages are.
        tail: last tokens of a prompt that are computed all the same.
    """

    def __init__(self, requests: Requests, specs: Sequence[AlgorithmSpec | None]) -> None:
        self.requests, host = requests, requests.manager.host
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
        if isinstance(host, PrefixPages):
            self._host = host
            host.on_evict = requests.manager.poison
        else:
            self.off.append("an engine gives out the pages, and keeps prefixes itself")
        self._counts = PrefixCounts()

    @property
    def counts(self) -> PrefixCounts:
        """What was found so far, and what is kept now."""
        if not self.off:
            self._counts.kept, self._counts.evicted = self._host.kept, self._host.evicted
        return self._counts

    def length(self, tokens: Tokens, salt: bytes = b"") -> int:
        """Tokens that a request of these would take over: whole pages, never all of them.

        Args:
            tokens: of the prompt.
            salt: what else keys and values depend on: adapters, weights, a tenant.
        """
        return len(self._find(tokens, salt)) * self.requests.config.page_tokens

    def begin(self, tokens: Tokens, salt: bytes = b"", most: int | None = None) -> int:
        """Take a request slot for a prompt, with the pages that are found.

        Args:
            tokens, salt: as of ``length``.
            most: no page behind these first tokens; all that are found by default. Who cannot go
                on at the end of a page truncates the request then.

        Returns:
            The slot. Its length says how many tokens it has.

        Raises:
            DeviceMemoryError, HostMemoryError: no room; nothing has changed.
        """
        page = self.requests.config.page_tokens
        pages = self._find(tokens, salt)
        if most is not None:
            pages = pages[: -(-most // page)]
        slot = self.requests.begin(pages, len(pages) * page)
        self._counts.asked += len(tokens)
        self._counts.found += len(pages) * page
        return slot

    def publish(self, slot: int, tokens: Tokens, salt: bytes = b"") -> None:
        """Let others find the full pages of a request.

        Args:
            slot: of the request, which goes on as before.
            tokens: its first ones; no page behind them is published.
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
        keys = page_keys(tokens, self.requests.config.page_tokens, salt)
        self._host.publish(self.requests.pages.of(slot), keys)

    def forget(self) -> None:
        """Let nothing be found that was published so far, after weights have changed say."""
        if not self.off:
            self.requests.manager.poison(self._host.forget())

    def _find(self, tokens: Tokens, salt: bytes) -> list[int]:
        if self.off:
            return []
        page = self.requests.config.page_tokens
        known = tokens[: max(0, len(tokens) - self.tail)]
        return self._host.find(page_keys(known, page, salt))
