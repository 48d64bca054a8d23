"""Two coordinators that are driven alike: one with pages of its own, one with those of an engine.

``run_engine_pages(on)`` draws lives of requests, in which pages are handed over, shared by
prompts with equal beginnings, and given back. Outputs and pages must be the same at each step.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from topkv.coordinator import SparseCoordinator
from topkv.errors import RequestError
from topkv_testing.integrity import check_integrity
from topkv_testing.kit import examples
from topkv_testing.machines.lifecycle_model import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    MOST_TOKENS,
    REQUESTS,
    make_coordinator,
)
from topkv_testing.tiers import Tier

PAGE, PAGES = 4, 29
SHAPE = (LAYERS, 2, KV_HEADS, DIM)
"""Shape of the keys and values of a token."""


class BlockPool:
    """An engine's block pool, over two coordinators that get the same tokens.

    Args:
        on: where they run.
        data: what is drawn.
        options: of ``SparseConfig``.

    Attributes:
        own, handed: the coordinators; the second gets its page ids from here.
        free: page ids that no request holds, in random order.
        pages: pages of each slot.
        seen: keys and values ``[n, L, 2, Hkv, D]`` of the tokens of each slot.
    """

    def __init__(self, on: Tier, data: st.DataObject, options: dict[str, Any]) -> None:
        self.on, self.data = on, data
        self.own = make_coordinator(on, **options)
        self.handed = make_coordinator(on, pages="engine", **options)
        self.free: list[int] = list(data.draw(st.permutations(range(1, PAGES)), "pages"))
        self.pages: dict[int, list[int]] = {}
        self.seen: dict[int, Tensor] = {}
        self.random = torch.Generator().manual_seed(data.draw(st.integers(0, 99), "seed"))

    def act(self) -> None:
        """Draw one action and do it."""
        if len(self.seen) < REQUESTS and self.data.draw(st.booleans(), "begin"):
            self.begin()
        elif self.seen:
            does = (*["forward"] * 6, "rollback", "truncate", "replace", "end")
            action = self.data.draw(st.sampled_from(does), "action")
            if action == "forward":
                self.forward()
            elif action == "end":
                self.end()
            elif action == "replace":
                self.replace()
            else:
                self.cut(action)

    def check(self) -> None:
        """Assert that pages add up on both sides."""
        check_integrity(self.own)
        check_integrity(self.handed)
        held = {page for pages in self.pages.values() for page in pages}
        assert self.handed.manager.host.used == len(held)

    def slot(self) -> int:
        """Draw one of the requests."""
        return self.data.draw(st.sampled_from([*self.seen]), "slot")

    def begin(self) -> None:
        """Begin a request, perhaps with pages of another one's tokens."""
        donor = self.data.draw(st.sampled_from([None, *self.seen]), "donor")
        shared = 0 if donor is None else len(self.seen[donor]) // PAGE
        shared -= self.data.draw(st.integers(0, shared), "kept") if shared else 0
        pages = [] if donor is None else self.pages[donor][:shared]
        slot, twin = self.own.request_begin(), self.handed.request_begin(pages, PAGE * shared)
        assert slot == twin
        self.pages[slot], self.seen[slot] = list(pages), torch.empty(0, *SHAPE)
        if donor is not None and shared:  # the other one computes them
            tokens = self.seen[donor][: PAGE * shared]
            run_forward(self.own, [slot], [], {slot: tokens}, torch.zeros(LAYERS, 0, HEADS, DIM))
            self.seen[slot] = tokens

    def forward(self) -> None:
        """Run a token or a chunk for some requests, with equal queries and selections."""
        slots = self.data.draw(st.lists(st.sampled_from([*self.seen]), min_size=1, unique=True))
        new: dict[int, Tensor] = {}
        decode = []
        for slot in slots:
            held = len(self.seen[slot])
            most = min(MOST_TOKENS - held, len(self.free) * PAGE + -held % PAGE)
            likely = [1, 1, 1, 0, 3, 7] if held else [6, 9, 13]
            tokens = min(self.data.draw(st.sampled_from(likely), "tokens"), max(most, 0))
            decode += [slot] if tokens == 1 and held else []
            new[slot] = torch.randn((tokens, *SHAPE), generator=self.random)
            self.hand_over(slot, held + tokens)
        count = sum(map(len, new.values()))
        q = torch.randn(LAYERS, count, HEADS, DIM, generator=self.random)
        chunks = [slot for slot in new if slot not in decode]
        outputs = [run_forward(of, chunks, decode, new, q) for of in (self.own, self.handed)]
        torch.testing.assert_close(*outputs, rtol=0, atol=0)
        for slot, each in new.items():
            self.seen[slot] = torch.cat([self.seen[slot], each])

    def hand_over(self, slot: int, length: int) -> None:
        """Give a request the pages that N tokens need."""
        missing = -(-length // PAGE) - len(self.pages[slot])
        if missing > 0:
            given = [self.free.pop() for _ in range(missing)]
            self.handed.request_add_pages(slot, given)
            self.pages[slot] += given

    def cut(self, call: str) -> None:
        """Roll back or truncate; pages behind the new length go back to the block pool."""
        slot = self.slot()
        others = {page for other in self.pages if other != slot for page in self.pages[other]}
        shared = PAGE * sum(page in others for page in self.pages[slot])
        held = len(self.seen[slot])  # what others hold may be left, but not written
        least = max(min(shared, held), held - 2) if call == "rollback" else min(shared, held)
        length = self.data.draw(st.integers(least, held), "length")
        refusals = []
        for coordinator in (self.own, self.handed):
            try:
                getattr(coordinator, call)(slot, length)
            except RequestError as refused:  # the ring does not reach back as far
                refusals.append(str(refused))
        assert refusals in ([], 2 * refusals[:1])
        if not refusals:
            self.seen[slot] = self.seen[slot][:length]
            if call == "truncate":
                self.drop(slot, -(-length // PAGE))

    def replace(self) -> None:
        """Replace full pages by others with the same tokens; nobody reads the old ones again."""
        slot = self.slot()
        full = len(self.seen[slot]) // PAGE
        first = self.data.draw(st.integers(0, full), "first")
        count = self.data.draw(st.integers(0, min(full - first, len(self.free))), "count")
        given = [self.free.pop() for _ in range(count)]
        old = self.pages[slot][first : first + count]
        for page, other in zip(old, given, strict=True):
            self.handed.manager.copy_page(page, other)
        self.handed.request_replace_pages(slot, first, given)
        self.pages[slot][first : first + count] = given
        held = {page for pages in self.pages.values() for page in pages}
        gone = [page for page in old if page not in held]
        for store, pools in zip(
            self.handed.manager.stores, self.handed.manager.representations, strict=True
        ):
            store.poison_pages(gone)
            pools.poison_pages(gone)
        self.free += gone

    def end(self) -> None:
        """End a request; its pages go back, unless others hold them."""
        slot = self.slot()
        for coordinator in (self.own, self.handed):
            coordinator.request_end(slot)
        del self.seen[slot]
        self.drop(slot, 0)
        del self.pages[slot]

    def drop(self, slot: int, keep: int) -> None:
        """Take back the pages of a request behind the first ``keep``."""
        gone, self.pages[slot] = self.pages[slot][keep:], self.pages[slot][:keep]
        held = {page for pages in self.pages.values() for page in pages}
        self.free += [page for page in gone if page not in held]


def run_forward(
    coordinator: SparseCoordinator,
    chunks: list[int],
    decode: list[int],
    new: dict[int, Tensor],
    q: Tensor,
) -> Tensor:
    """Run one forward of a coordinator on doubles, whose selections follow from its rows.

    Args:
        chunks, decode: slots that append a chunk, and those that append a token.
        new: keys and values ``[n, L, 2, Hkv, D]`` of the new tokens of each slot.
        q: ``[L, rows, H, D]``, the decode rows first; zeros if it has no rows.

    Returns:
        Outputs ``[L, rows, H, D]``, on a CPU.
    """
    device = coordinator.config.device
    rows = torch.cat([*(new[slot] for slot in [*decode, *chunks]), torch.empty(0, *SHAPE)])
    if not q.shape[1]:
        q = torch.zeros(LAYERS, len(rows), HEADS, DIM)
    algorithms = {path.view.layer: path.algorithm for path in coordinator.layers}
    coordinator.forward_begin(decode, [(slot, len(new[slot])) for slot in chunks])
    count = len(decode) * KV_HEADS * 3  # different units for each lane
    ids = torch.arange(count, dtype=torch.int32, device=device).view(-1, 3) % 5
    for layer, algorithm in algorithms.items():
        if algorithm:
            algorithm.next_ids[layer] = ids
    outputs = []
    for layer in range(LAYERS):
        k, v = rows[:, layer].to(device).unbind(1)
        outputs.append(coordinator.attention(layer, q[layer].to(device), k, v))
    coordinator.forward_end()
    for algorithm in filter(None, algorithms.values()):
        algorithm.next_ids.clear()
    return torch.stack(outputs).cpu()


def run_engine_pages(on: Tier, **options: Any) -> None:
    """Draw lives until hypothesis has seen enough; ``options`` are those of ``SparseConfig``."""
    few = examples(on, cpu=50, interpret=8)

    @settings(few, phases=[Phase.explicit, Phase.generate])
    @given(st.data())
    def check(data: st.DataObject) -> None:
        pool = BlockPool(on, data, options)
        try:
            for _ in range(data.draw(st.integers(1, 20), "steps")):
                pool.act()
                pool.check()
        finally:
            pool.own.close()
            pool.handed.close()

    check()
