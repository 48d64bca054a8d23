"""The requests that an engine serves: which slot each has, and where its rows are in a forward.

An engine knows its requests by names, and decides in each step which of them have how many tokens.
Every action follows from what it decides alone, so that all ranks do the same. A request has a
slot from the step that begins it until it ends or is preempted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from attrs import define

from topkv import SparseCoordinator
from topkv.errors import RequestError
from topkv_engines import rows


@define
class Held:
    """A request that has a slot.

    Attributes:
        slot: of the coordinator.
        prefill: tokens that are computed before it decodes: of its prompt, and of what it had
            generated when it was preempted.
    """

    slot: int
    prefill: int


class Requests(ABC):
    """Requests of one coordinator by the names that an engine has for them.

    Args:
        coordinator: with ``pages: engine``.

    Attributes:
        held: requests that have a slot.
        tokens: of each request of the step that is open, in the engine's order; empty between
            steps.
        computed: tokens of each before its last step, as the engine counts them.
        decoded: places of the requests that decode, among those of the open forward.
        order: of the rows of the open forward; None where it is the engine's.
    """

    def __init__(self, coordinator: SparseCoordinator) -> None:
        self.coordinator = coordinator
        self.held: dict[Hashable, Held] = {}
        self.tokens: Mapping[Hashable, int] = {}
        self.computed: dict[Hashable, int] = {}
        self.decoded: list[int] = []
        self.order: rows.Order | None = None

    @abstractmethod
    def schedule(self, step: Any) -> None:
        """Begin a step: end, begin and extend requests as the engine has decided, then ``open``.

        Args:
            step: as the engine describes it.
        """

    def begin(self, name: Hashable, pages: Sequence[int], computed: int, prefill: int) -> None:
        """Give a request a slot.

        Args:
            name: of the request, which has none.
            pages: that the engine gives it.
            computed: tokens that they hold already; whole pages.
            prefill: see ``Held``.
        """
        slot = self.coordinator.request_begin(pages, computed)
        self.held[name], self.computed[name] = Held(slot, prefill), computed

    def extend(self, name: Hashable, pages: Sequence[int], computed: int) -> None:
        """Go on with a request that has a slot.

        Args:
            name: of the request.
            pages: that the engine gives it besides.
            computed: tokens that it has. Fewer than topkv has are what the engine kept of drafts,
                of one step or of two.
        """
        self.coordinator.request_add_pages(self.held[name].slot, pages)
        self.computed[name] = computed

    def end(self, name: Hashable) -> None:
        """Give the slot of a request back, if it has one."""
        held = self.held.pop(name, None)
        self.computed.pop(name, None)
        if held is not None:
            self.coordinator.request_end(held.slot)

    def open(self, tokens: Mapping[Hashable, int]) -> None:
        """Open a step with these tokens of each request, all of which ``begin`` or ``extend`` has
        named since the last one."""
        self.tokens = tokens
        self._take_back()

    def _take_back(self) -> None:
        """Take back the drafts that were rejected since: tokens that the engine counts no more."""
        if self.coordinator.config.max_queries == 1:
            return  # nothing was drafted
        lengths = {self.held[name].slot: self.computed[name] for name in self.tokens}
        lengths = {
            slot: count
            for slot, count in lengths.items()
            if 0 < self.coordinator.length(slot) - count < 2 * self.coordinator.config.max_queries
        }
        if lengths:
            self.coordinator.rollback([*lengths], [*lengths.values()])

    def decodes(self, name: Hashable) -> bool:
        """Return True if the tokens of a request in the open step are behind its prompt: one, and
        those that were drafted."""
        return self.computed[name] >= self.held[name].prefill

    def settle(self) -> None:
        """Settle, where it is due, requests that decode in the open step, before its forward."""
        rows = [self.held[name].slot for name in self.tokens if self.decodes(name)]
        self.coordinator.settle(rows)

    def has_prompts(self) -> bool:
        """Return True if rows of the open step belong to prompts."""
        return not all(self.decodes(name) for name in self.tokens)

    def pad(self, count: int, queries: int) -> None:
        """Open a forward of requests that are none, and drop the one before."""
        self.order = None
        self.coordinator.forward_abort()
        self.coordinator.forward_begin([-1] * count, queries=queries)

    def forward(self, names: Sequence[Hashable], count: int) -> int:
        """Open the coordinator's forward.

        Args:
            names: the requests in the order of their rows.
            count: requests of a step that only decodes, with those that pad it.

        Returns:
            Rows of the forward, in the engine's order.

        Raises:
            RequestError: topkv and the engine do not agree about a request.
        """
        decoded: list[tuple[int, int]] = []
        prompts: list[tuple[int, int]] = []
        slots: list[int] = []
        chunks: list[tuple[int, int]] = []
        row, self.decoded = 0, []
        for place, name in enumerate(names):
            self._check(name)
            slot, tokens = self.held[name].slot, self.tokens[name]
            if self.decodes(name):
                decoded.append((row, tokens))
                self.decoded.append(place)
                slots.append(slot)
            else:
                prompts.append((row, tokens))
                chunks.append((slot, tokens))
            row += tokens
        append = [tokens for _, tokens in decoded]
        queries, self.order = max(append, default=1), None
        if all(place == (n * queries, queries) for n, place in enumerate(decoded)):
            pads = 0 if chunks else count - len(names)
            self.coordinator.forward_begin(slots + [-1] * pads, chunks, queries=queries)
            return row + pads * queries
        self.coordinator.forward_begin(slots, chunks, append, queries)
        self.order = rows.order(decoded, prompts, queries, self.coordinator.config.device)
        return row

    def _check(self, name: Hashable) -> None:
        """Raise RequestError if topkv does not have the tokens that the engine counts."""
        length, computed = self.coordinator.length(self.held[name].slot), self.computed[name]
        if length != computed:
            raise RequestError(
                f"request {name} has {length} tokens in topkv and {computed} by the engine's "
                "scheduler; this is a bug of topkv, please report it"
            )

    def close(self) -> None:
        """End a step: count its tokens."""
        self.tokens, self.order = {}, None
        forward = self.coordinator.forward
        if forward is not None:
            self.coordinator.forward_end(offloaded=not forward.chunks)

    def abort(self) -> None:
        """Drop a step after an exception: its tokens are not appended."""
        self.tokens, self.order = {}, None
        self.coordinator.forward_abort()
