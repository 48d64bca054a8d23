"""The conformance suite of eviction policies.

::

    from topkv_testing.evictions import EvictionTests


    class TestFifo(EvictionTests):
        @pytest.fixture
        def plugin(self):
            return "fifo"

What a policy gives follows from which slots are stale and how many units are missing, so that all
states of a small buffer can be tried. Plans are those of the core's transfer engine: on the tier
``cpu`` it calls the torch method, on the others the kernel, with blocks that are padded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from topkv.hooks.eviction import EvictionSetup
from topkv.hooks.transfer import TransferSetup
from topkv.plugins.contract import has_hook
from topkv.transfer.eviction import require_kernel
from topkv_testing.kit import KitTests, Subject, examples
from topkv_testing.transfer.bench import Row, TransferBench, group_shape

FEW = 5
"""Slots of the largest buffer all of whose states are tried."""

LANES = 4
"""Lanes of each of two requests in a plan."""


def new_position(policy: Any, stale: Tensor, misses: int, state: Tensor | None = None) -> Tensor:
    """Call the torch methods of a policy.

    Args:
        policy: the policy.
        stale: bool ``[C]``, by position.
        misses: at most as many as there are stale slots.
        state: int32 ``[C]``, by position, which then holds the new state by new position. Zeros
            if None.

    Raises:
        AssertionError: it is no permutation of ``0 .. C - 1``.
    """
    slots, device = len(stale), stale.device
    position = torch.arange(slots, device=device)
    rank = torch.cumsum(stale, 0) - stale.long()
    count = torch.tensor(misses, device=device)
    after = torch.zeros(slots, dtype=torch.int32, device=device)
    if has_hook(policy, "new_state"):
        before = torch.zeros_like(after) if state is None else state
        after = policy.new_state(before.clone(), stale, rank, count, slots)
    given = (position, stale, rank, position - rank, stale.sum(), count, slots, after)
    found: Tensor = policy.new_position(*given)
    if sorted(found.tolist()) != list(range(slots)):
        raise AssertionError(
            f"new_position must give a permutation of 0 .. {slots - 1}, got {found.tolist()} for "
            f"stale = {stale.int().tolist()} and {misses} misses"
        )
    if state is not None:
        state[found.long()] = after
    return found


def states(slots: int) -> Iterator[tuple[tuple[bool, ...], int]]:
    """Every ``(stale, misses)`` of a buffer of N slots."""
    for stale in itertools.product((False, True), repeat=slots):
        yield from ((stale, misses) for misses in range(sum(stale) + 1))


class LaneOrder:
    """One lane by the contract: slots in eviction order, and the unit of each slot."""

    def __init__(self, slots: int) -> None:
        self.order = list(range(slots))
        self.unit_in = [-1] * slots
        self.state = torch.zeros(slots, dtype=torch.int32)

    def select(self, policy: Any, units: Sequence[int]) -> list[int]:
        """Plan distinct units that are in no ring; return the slot of each of them."""
        held = {unit: slot for slot, unit in enumerate(self.unit_in) if unit >= 0}
        missed = [unit for unit in units if unit not in held]
        hits = {held[unit] for unit in units if unit in held}
        stale = [slot not in hits for slot in self.order]
        coldest = [slot for slot in self.order if slot not in hits][: len(missed)]
        target = new_position(policy, torch.tensor(stale), len(missed), self.state).tolist()
        moved = dict(zip(target, self.order, strict=True))
        self.order = [moved[place] for place in range(len(moved))]
        for unit, slot in zip(missed, coldest, strict=True):
            self.unit_in[slot] = unit
        return [self.unit_in.index(unit) for unit in units]


class EvictionTests(KitTests):
    """Every test of an eviction policy; the contract is ``topkv.hooks.eviction``."""

    kind = "eviction"

    def test_new_positions_are_a_permutation(self, subject: Subject) -> None:
        """In every state of a small buffer, and in drawn states of larger ones."""
        policy, device = _policy(subject), subject.tier.device
        for slots in range(1, FEW + 1):
            for stale, misses in states(slots):
                new_position(policy, torch.tensor(stale, device=device), misses)

        @examples(subject.tier, cpu=60, interpret=20, gpu=20)
        @given(st.lists(st.booleans(), min_size=FEW + 1, max_size=70), st.integers(0, 70))
        def check(stale: list[bool], misses: int) -> None:
            least = min(misses, sum(stale))
            new_position(policy, torch.tensor(stale, device=device), least)

        check()

    def test_positions_depend_on_the_arguments_alone(self, subject: Subject) -> None:
        """Equal arguments give equal positions, whatever came between; arguments are only read."""
        policy = _policy(subject)
        stale = torch.tensor([True, False, True, True, False, True, True])
        before = stale.clone()
        first = new_position(policy, stale, 2).clone()
        new_position(policy, ~stale, 1)
        again = new_position(policy, stale, 2)
        assert torch.equal(stale, before), "new_position wrote to its argument stale"
        assert torch.equal(first, again), (
            f"the same arguments give {first.tolist()}, and later {again.tolist()}"
        )

    def test_plans_evict_the_coldest_and_order_as_the_formula_says(self, subject: Subject) -> None:
        """Plans over buffers of any size, no power of two among them: the slots that were taken,
        and the order that remains, are those of the torch method to the last place."""
        policy, tier = _policy(subject), subject.tier
        steps = 3 if tier.name == "interpret" else 12
        for slots in (1, 5, 16, 33):
            group = group_shape(
                unit=1,
                select=slots,
                slots=slots,
                lane_heads=LANES,
                dim=2,
                requests=2,
                units=4 * slots + 8,
                layers=1,
            )
            bench = TransferBench(_engine_with(subject, policy), group, tier.device, tier.impl)
            lanes = [LaneOrder(slots) for _ in range(2 * LANES)]
            for _ in range(steps):
                _step(bench, lanes, policy)


def _policy(subject: Subject) -> Any:
    """The policy, with a kernel on the tiers of kernels."""
    policy = subject.make(EvictionSetup(subject.tier.device))
    if subject.tier.impl == "triton":
        require_kernel(policy, subject.entry.name)
    return policy


def _engine_with(subject: Subject, policy: Any) -> Any:
    """A factory of the core's engine with this policy in place of the one that it is given."""

    def make(setup: TransferSetup, impl: str) -> Any:
        setup = evolve(setup, eviction=policy)
        return subject.registry.create("transfer", "zero_copy", setup, impl)

    return make


def _step(bench: TransferBench, lanes: Sequence[LaneOrder], policy: Any) -> None:
    """Plan a random selection of each lane, and compare with the formula."""
    group, generator = bench.group, bench.generator
    universe = group.max_units - group.ring_slots - 1
    ids = []
    for lane in lanes:
        held = [unit for unit in lane.unit_in if unit >= 0]
        held = [held[place] for place in torch.randperm(len(held), generator=generator)]
        others = torch.randperm(universe, generator=generator).tolist()
        hits = int(torch.randint(0, len(held) + 1, (), generator=generator))
        misses = int(torch.randint(0, group.select - hits + 1, (), generator=generator))
        chosen = held[:hits] + [unit for unit in others if unit not in held][:misses]
        mixed = torch.randperm(len(chosen), generator=generator).tolist()
        ids.append([chosen[place] for place in mixed])
    before = [list(lane.order) for lane in lanes]
    expected = [lane.select(policy, units) for lane, units in zip(lanes, ids, strict=True)]
    bench.put([Row(slot, group.max_units, group.max_units) for slot in range(2)])
    plan = bench.run(0, [units + [-1] * (group.select - len(units)) for units in ids])
    orders = bench.store.order[0].cpu().tolist()
    for number, lane in enumerate(lanes):
        what = f"C = {group.buffer_slots}, order {before[number]}, selected {ids[number]}"
        got = plan["slots"][number][: len(ids[number])]
        assert got == expected[number], (
            f"{what}: the units lie in slots {got}; with the coldest evicted they lie in "
            f"{expected[number]}"
        )
        assert orders[number] == lane.order, (
            f"{what}: the order is {orders[number]} afterwards, by the formula {lane.order}"
        )
