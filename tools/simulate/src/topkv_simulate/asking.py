"""Recorder of what prompts ask for, which makes traces of ``topkv_simulate.asked``.

Calls of ``coordinator.keeper`` and those that change which pages a request holds are wrapped.
The core knows nothing of it, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from topkv.coordinator import SparseCoordinator
from topkv.errors import CapabilityError, RequestError
from topkv_prefixes.pages import page_keys
from topkv_prefixes.places import PagePlaces
from topkv_prefixes.prefixes import Prefixes
from topkv_simulate.asked import DOES, Asked


@contextmanager
def asking(coordinator: SparseCoordinator) -> Iterator[Asking]:
    """Record everything that prompts ask for meanwhile.

    Of a model that ``topkv.attach`` has attached, the coordinator is ``handle.coordinator``::

        with asking(handle.coordinator) as recorder:
            model.generate(**inputs)
        recorder.trace().save(Path("requests.jsonl"))

    Calls of ``prefetch`` are not recorded: their pages are counted where a prompt begins.

    Args:
        coordinator: with ``pages: prefixes``, without requests and before it keeps a page: pages
            that it keeps already would not be there for other sizes.

    Raises:
        CapabilityError: prefixes are not kept, with every reason.
        RequestError: there are requests or kept pages already.
    """
    recorder = Asking(coordinator)
    with recorder.wrapped():
        yield recorder


class Asking:
    """Recorder of the events so far; see ``asking``."""

    def __init__(self, coordinator: SparseCoordinator) -> None:
        prefixes, off = coordinator.keeper, ["nobody keeps pages; set pages to 'prefixes'"]
        if isinstance(prefixes, Prefixes):
            off = list(prefixes.off)
            if prefixes.settings.quotas:
                off.append("quotas are not replayed; leave them out")
        if not coordinator.manager.host.bytes.numel():
            off.append("all layers lie on the device, and the host pool has no bytes")
        if off:
            raise CapabilityError("nothing can be recorded", off)
        self.coordinator, self.prefixes = coordinator, prefixes
        self.requests, self.pages = coordinator.requests, coordinator.requests.pages
        there = int(self.requests.active.sum()), self.prefixes.counts.kept
        if any(there):
            raise RequestError(
                "recording begins before the first request, because what is kept by now is not "
                f"known for other sizes; {there[0]} requests and {there[1]} kept pages are there: "
                "end them and call forget() of prefixes, or attach the model anew"
            )
        self._events: list[tuple[Any, ...]] = []
        self._numbers: dict[bytes, int] = {}
        self._begins = False

    def trace(self) -> Asked:
        """Return everything that was recorded so far."""
        config, manager = self.coordinator.config, self.coordinator.manager
        return Asked(
            config.page_tokens,
            manager.host.bytes.numel() // manager.host.num_pages,
            PagePlaces(manager).object_bytes,
            config.max_requests,
            config.max_request_tokens,
            tuple(self._events),
        )

    def save(self, path: Path) -> None:
        """Write what was recorded so far to a file for ``topkv tiers``."""
        self.trace().save(path)

    @contextmanager
    def wrapped(self) -> Iterator[None]:
        """Record every call, and leave the coordinator as it was at the end."""
        wrappers: list[tuple[Any, str, Callable[..., Any]]] = [
            (self.prefixes, "fetch", self._fetch),
            (self.prefixes, "begin", self._begin),
            (self.prefixes, "publish", self._publish),
            (self.prefixes, "forget", self._forget),
            (self.requests, "_cut", self._cut),
            (self.pages, "lease", self._lease),
            (self.pages, "own_page", self._own_page),
            (self.pages, "add", self._add),
            (self.pages, "shrink", self._shrink),
        ]
        try:
            for owner, name, wrapper in wrappers:
                setattr(owner, name, _calling(wrapper, getattr(owner, name)))
            yield
        finally:
            for owner, name, _ in wrappers:
                vars(owner).pop(name, None)

    def _note(self, *event: Any) -> None:
        self._events.append(event)

    def _named(self, keys: Sequence[bytes]) -> list[int]:
        return [self._numbers.setdefault(key, len(self._numbers)) for key in keys]

    # Each gets the method that it wraps, and the arguments.

    def _fetch(self, call: Any, tokens: Any, salt: bytes = b"") -> None:
        self._note(DOES.FETCH, len(tokens), self._named(self.prefixes._keys(tokens, salt)))
        call(tokens, salt)

    def _begin(self, call: Any, tokens: Any, salt: bytes = b"", most: int | None = None) -> int:
        page, keys = self.coordinator.config.page_tokens, self.prefixes._keys(tokens, salt)
        names = self._named(keys if most is None else keys[: -(-most // page)])
        self._begins = True
        try:
            slot: int = call(tokens, salt, most)
        finally:
            self._begins = False
        self._note(DOES.BEGIN, slot, len(tokens), names)
        return slot

    def _publish(self, call: Any, slot: int, tokens: Any, salt: bytes = b"") -> None:
        call(slot, tokens, salt)
        keys = page_keys(tokens, self.coordinator.config.page_tokens, salt)
        self._note(DOES.PUBLISH, slot, self._named(keys))

    def _forget(self, call: Any, stored: bool = True) -> None:
        call(stored)
        self._note(DOES.FORGET, int(stored))

    def _cut(self, call: Any, slots: np.ndarray, lengths: np.ndarray) -> None:
        call(slots, lengths)
        pages = lengths // self.coordinator.config.page_tokens
        for slot, page in zip(slots.tolist(), pages.tolist(), strict=True):
            self._note(DOES.CUT, slot, page)

    def _lease(self, call: Any, needs: Sequence[tuple[int, int]], spare: int = 0) -> None:
        missing = any(self.pages.needed(length) > self.pages.count[slot] for slot, length in needs)
        call(needs, spare)
        if missing or spare:
            reported = [[int(slot), int(length)] for slot, length in needs]
            self._note(DOES.LEASE, int(spare), reported)

    def _own_page(self, call: Any, slot: int, index: int) -> None:
        held = index < self.pages.count[slot]
        shared = held and self.pages.manager.host.shared(int(self.pages.table[slot, index]))
        call(slot, index)
        if shared:
            self._note(DOES.COPY, int(slot), int(index))

    def _add(self, call: Any, slot: int, pages: Sequence[int]) -> None:
        call(slot, pages)
        if pages and not self._begins:
            self._note(DOES.FORK, slot, self._holder(slot, pages), len(pages))

    def _holder(self, twin: int, pages: Sequence[int]) -> int:
        """Return the first other request that holds these pages."""
        slots = range(self.coordinator.config.max_requests)
        found = (each for each in slots if self.pages.of(each)[: len(pages)] == list(pages))
        return next(each for each in found if each != twin)

    def _shrink(self, call: Any, slot: int, keep: int) -> None:
        call(slot, keep)
        self._note(DOES.SHRINK, slot, keep)


def _calling(wrapper: Callable[..., Any], call: Any) -> Callable[..., Any]:
    def reported(*arguments: Any, **options: Any) -> Any:
        return wrapper(call, *arguments, **options)

    return reported
