"""Random histories of requests over a transfer engine alone: no coordinator, no algorithm."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from topkv_testing import strategies
from topkv_testing.kit import Subject
from topkv_testing.models.host_formats import CODED, formats_of
from topkv_testing.transfer.bench import TransferBench, group_shape
from topkv_testing.transfer.token_cache import TokenCache

UNITS = 14
"""Units that one request can reach."""


class ResidencyMachine(RuleBasedStateMachine):
    """Prompts, decode steps, rollbacks, truncations and reuse, against a cache in plain Python.

    After every rule: each order is a permutation and the one that the model has, slots and
    units are a bijection, held slots, ring and host have the bytes of the tokens.

    Make a subclass with ``subject`` set, and run it with ``run_state_machine_as_test``.
    """

    subject: Subject
    cache: TokenCache

    @initialize(
        lane_heads=st.integers(1, 2),
        heads_per_lane=st.integers(1, 2),
        unit=st.sampled_from([1, 2, 4]),
        ring=st.integers(2, 3),
        select=st.integers(2, 4),
        spare=st.integers(0, 3),
        coded=st.booleans(),
        seed=strategies.seeds(),
    )
    def start(
        self, unit: int, ring: int, select: int, spare: int, coded: bool, seed: int,
        **heads: Any,
    ) -> None:  # fmt: skip
        subject, shape = self.subject, {**heads, "slots": select + spare, "units": UNITS}
        if coded and CODED in formats_of(subject.entry):
            shape["host_format"] = CODED
        group = group_shape(unit=unit, ring=ring, select=select, **shape)
        bench = TransferBench(
            *(subject.make, group, subject.tier.device, subject.tier.impl),
            seed=seed,
        )
        self.cache = TokenCache(bench, seed)
        self.most = UNITS * unit

    def _slot(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.cache.requests)), label="slot")

    def _any(self) -> bool:
        return bool(self.cache.requests)

    @rule(slot=st.integers(0, 2), resident=st.booleans(), units=st.integers(0, 7))
    def begin(self, slot: int, resident: bool, units: int) -> None:
        """Begin a request with a prompt in a slot, used before or not."""
        self.cache.begin(slot, resident)
        self.cache.prefill(slot, units * self.cache.group.unit)

    @precondition(_any)
    @rule(data=st.data(), tokens=st.integers(1, 17))
    def prefill(self, data: st.DataObject, tokens: int) -> None:
        """Append a chunk, longer than the ring or shorter than a unit."""
        slot = self._slot(data)
        room = self.most - self.cache.requests[slot].length
        self.cache.prefill(slot, min(tokens, room))

    @precondition(_any)
    @rule(
        data=st.data(),
        steps=st.integers(1, 6),
        how=st.sampled_from(["sliding", "jumping", "wild"]),
        overlap=st.sampled_from([0.0, 0.5, 0.85, 1.0]),
        seed=strategies.seeds(),
    )
    def decode(self, data: st.DataObject, steps: int, how: str, overlap: float, seed: int) -> None:
        """Decode some requests, in any order among padded rows; some of them append."""
        cache, group = self.cache, self.cache.group
        slots = data.draw(strategies.batches(sorted(cache.requests), group.max_requests))
        wants = data.draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
        lanes = len(slots) * group.lane_heads
        if how == "wild":
            wild = strategies.adversarial_ids(UNITS, group.select)
            chosen = data.draw(st.lists(wild, min_size=lanes, max_size=lanes))
        else:
            streams = [
                strategies.selections(UNITS, group.select, overlap, how, seed + lane)
                for lane in range(lanes)
            ]
        for _ in range(steps):
            ids: Any = chosen if how == "wild" else [next(stream) for stream in streams]
            appends = [
                slot >= 0 and want and cache.requests[slot].length < self.most
                for slot, want in zip(slots, wants, strict=True)
            ]
            cache.decode(slots, [ids] * len(cache.layers), appends)

    @precondition(_any)
    @rule(data=st.data(), back=st.integers(1, 9))
    def rollback(self, data: st.DataObject, back: int) -> None:
        """Roll tokens back as far as the ring reaches, and write a unit anew."""
        slot = self._slot(data)
        length = max(0, self.cache.requests[slot].length - back)
        if self.cache.can_roll_back(slot, length):
            self.cache.rollback(slot, length)

    @precondition(_any)
    @rule(data=st.data())
    def flush(self, data: st.DataObject) -> None:
        """Flush the open unit to the host ahead of time."""
        self.cache.flush(self._slot(data))

    @precondition(_any)
    @rule(data=st.data(), resident=st.booleans())
    def truncate(self, data: st.DataObject, resident: bool) -> None:
        """Cut a request anywhere and restore its rows."""
        slot = self._slot(data)
        length = data.draw(st.integers(0, self.cache.requests[slot].length))
        self.cache.truncate(slot, length, resident)

    @precondition(_any)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """End a request; its slot is reset when the next one begins."""
        del self.cache.requests[self._slot(data)]

    @invariant()
    def everything_is_where_the_model_has_it(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()
