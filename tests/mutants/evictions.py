"""Eviction policies with one bug each, and the test of the eviction suite that sees each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import evolve

from tests.mutants.harness import Mutant, name_of
from topkv.entries import PluginEntry
from topkv.plugins.discovery import hookimpl
from topkv.transfer.eviction import LeastRecentlyUsed
from topkv_testing.evictions import EvictionTests


@triton.jit
def _fifo(position, stale, stale_rank, hit_rank, stale_count, misses, slots: tl.constexpr, state):
    victim = stale & (stale_rank < misses)
    gone = tl.minimum(stale_rank, misses)
    return tl.where(victim, slots - misses + stale_rank, position - gone)


@triton.jit
def _fifo_of_blocks(
    position, stale, stale_rank, hit_rank, stale_count, misses, slots: tl.constexpr, state
):
    victim = stale & (stale_rank < misses)
    gone = tl.minimum(stale_rank, misses)
    return tl.where(victim, position.shape[0] - misses + stale_rank, position - gone)


@triton.jit
def _one_victim_too_many(
    position, stale, stale_rank, hit_rank, stale_count, misses, slots: tl.constexpr, state
):
    loaded = stale & (stale_rank <= misses)
    kept = tl.where(stale, stale_rank - misses, stale_count + hit_rank)
    return tl.where(loaded, stale_count - misses + stale_rank, kept)


@triton.jit
def _victims_stay_cold(
    position, stale, stale_rank, hit_rank, stale_count, misses, slots: tl.constexpr, state
):
    return tl.where(stale, stale_rank, stale_count + hit_rank)


class FirstInFirstOut:
    """Slots keep their places, but for the victims, which go to the end as they are filled."""

    new_position_kernel = _fifo

    def __init__(self, setup):
        """Nothing depends on the setup."""

    @hookimpl
    def new_position(
        self, position, stale, stale_rank, hit_rank, stale_count, misses, slots, state
    ):
        victim = stale & (stale_rank < misses)
        gone = torch.minimum(stale_rank, misses)
        return torch.where(victim, slots - misses + stale_rank, position - gone)


@triton.jit
def _counted(state, stale, stale_rank, misses, slots: tl.constexpr):
    return tl.where(stale & (stale_rank < misses), 1, tl.where(stale, state, state + 1))


@triton.jit
def _never_reset(state, stale, stale_rank, misses, slots: tl.constexpr):
    return tl.where(stale, state, state + 1)


@triton.jit
def _by_count(
    position, stale, stale_rank, hit_rank, stale_count, misses, slots: tl.constexpr, state
):
    mine = (state * slots + position)[:, None]
    other = (state * slots + position)[None, :]
    before = (other < mine) & (position < slots)[None, :]
    return tl.sum(before.to(tl.int32), 1)


class LeastFrequentlyUsed:
    """Slots stand by the number of times that their units were selected, then as they stood."""

    new_position_kernel = _by_count
    new_state_kernel = _counted

    def __init__(self, setup):
        """Nothing depends on the setup."""

    @hookimpl
    def new_state(self, state, stale, stale_rank, misses, slots):
        loaded = stale & (stale_rank < misses)
        return torch.where(loaded, 1, torch.where(stale, state, state + 1)).int()

    @hookimpl
    def new_position(
        self, position, stale, stale_rank, hit_rank, stale_count, misses, slots, state
    ):
        order = torch.argsort(state * slots + position, stable=True)
        target = torch.empty_like(order)
        target[order] = position.to(order)
        return target


class KernelNeverForgets(LeastFrequentlyUsed):
    """The kernel lets a loaded unit go on from the count of the unit that it takes the slot of."""

    new_state_kernel = _never_reset


class TakesTheBlockForTheBuffer(FirstInFirstOut):
    """The kernel takes the padded block for the slots: right where C is a power of two."""

    new_position_kernel = _fifo_of_blocks


class HitsKeepTheirPlaces(LeastRecentlyUsed):
    """Hits keep their places while the others move up: two slots in one place."""

    @hookimpl
    def new_position(
        self, position, stale, stale_rank, hit_rank, stale_count, misses, slots, state
    ):
        new = super().new_position(
            position, stale, stale_rank, hit_rank, stale_count, misses, slots, state
        )
        return torch.where(stale, new, position)


class CountsVictimsFromOne(LeastRecentlyUsed):
    """One slot too many goes behind the stale ones: off by one."""

    @hookimpl
    def new_position(
        self, position, stale, stale_rank, hit_rank, stale_count, misses, slots, state
    ):
        loaded = stale & (stale_rank <= misses)
        kept = torch.where(stale, stale_rank - misses, stale_count + hit_rank)
        return torch.where(loaded, stale_count - misses + stale_rank, kept)


class KernelCountsVictimsFromOne(LeastRecentlyUsed):
    """The kernel alone is off by one."""

    new_position_kernel = _one_victim_too_many


class KernelLeavesVictimsCold(LeastRecentlyUsed):
    """The kernel evicts next what it has just loaded: a permutation, and another formula."""

    new_position_kernel = _victims_stay_cold


class OneSlotTooWide(FirstInFirstOut):
    """Victims go behind the end of the order, where there is no slot."""

    @hookimpl
    def new_position(
        self, position, stale, stale_rank, hit_rank, stale_count, misses, slots, state
    ):
        return super().new_position(
            position, stale, stale_rank, hit_rank, stale_count, misses, slots + 1, state
        )


class TurnsRound(FirstInFirstOut):
    """Keeps a count of its own, and gives other positions at every second call."""

    calls = 0

    @hookimpl
    def new_position(
        self, position, stale, stale_rank, hit_rank, stale_count, misses, slots, state
    ):
        new = super().new_position(
            position, stale, stale_rank, hit_rank, stale_count, misses, slots, state
        )
        self.calls += 1
        return new.roll(self.calls % 3)


def _entry(policy: type) -> PluginEntry:
    return PluginEntry(policy.__name__.lower(), "eviction", f"{__name__}:{policy.__name__}")


CLEAN = _entry(FirstInFirstOut)
COUNTS = _entry(LeastFrequentlyUsed)


def _mutant(broken: type, test: str, *tiers: str) -> Mutant:
    return Mutant(
        name_of(broken), EvictionTests, f"test_{test}", _entry(broken), CLEAN, tiers or ("cpu",)
    )


_PERMUTES = "new_positions_are_a_permutation"
_PLANS = "plans_evict_the_coldest_and_order_as_the_formula_says"

MUTANTS = [
    _mutant(HitsKeepTheirPlaces, _PERMUTES),
    _mutant(CountsVictimsFromOne, _PERMUTES),
    _mutant(OneSlotTooWide, _PERMUTES),
    _mutant(TurnsRound, "positions_depend_on_the_arguments_alone"),
    _mutant(TakesTheBlockForTheBuffer, _PLANS, "interpret"),
    _mutant(KernelCountsVictimsFromOne, _PLANS, "interpret"),
    _mutant(KernelLeavesVictimsCold, _PLANS, "interpret"),
    evolve(_mutant(KernelNeverForgets, _PLANS, "interpret"), clean=COUNTS),
]
