"""One group of many lanes under fuzz: the draws of the fuzzer, beside the model of both tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import define

from topkv.types import GroupShape
from topkv_testing.strategies import INT32
from topkv_testing.transfer.bench import Make, Row, TransferBench, raw
from topkv_testing.transfer.token_cache import Request, TokenCache

VERIFIED = 0.2
"""Share of calls that verify drafts."""


@define
class Slot:
    """The selections that the fuzzer draws for a request.

    Attributes:
        how: kind of its selections: 0 sliding, 1 jumping, 2 wild.
        overlap: share of a selection that stays in the next one.
        ids: the last selection, ``[layers, lane_heads, K]``.
        start: where the sliding window stands.
        appends: its ring holds its newest tokens, so that it can append.
    """

    how: int
    overlap: float
    ids: np.ndarray
    start: int = 0
    appends: bool = False


class FuzzedGroup:
    """One group under fuzz, everything drawn from one seed.

    Args:
        make: factory of the engine.
        group: its shape.
        device, impl: where and with which implementation it runs.
        seed: of everything.
    """

    def __init__(
        self, make: Make, group: GroupShape, device: torch.device, impl: str, seed: int
    ) -> None:
        self.group, self.device = group, device
        self.rng = np.random.default_rng(seed)
        # The ring holds the open unit, and as many tokens behind it as a row appends.
        self.most = most = min(8, (group.ring_slots - 1) * group.unit)
        self.bench = TransferBench(make, group, device, impl, seed=seed, max_queries=most)
        self.bench.watched = False  # it would cost more than all calls
        self.cache = TokenCache(self.bench, seed)
        self.truth = self.bench.store.entries.cpu().clone()
        self.tokens = [self.bench.host_tokens(slot) for slot in range(group.max_requests)]
        self.slots = [self._begin(slot) for slot in range(group.max_requests)]

    def _begin(self, slot: int) -> Slot:
        """Give a slot a new owner, whose tokens are all on the host already."""
        group, rng = self.group, self.rng
        short = (group.buffer_slots + 1) * group.unit
        most = group.max_units * group.unit
        length = int(rng.integers(1, (short if rng.random() < 0.4 else most) + 1))
        resident = bool(rng.random() < 0.5)
        state = Slot(
            how=int(rng.integers(3)),
            overlap=float(rng.choice([0.0, 0.5, 0.85, 1.0])),
            ids=rng.integers(
                0, group.max_units, (len(group.layers), group.lane_heads, group.select)
            ),
        )
        self._store(slot)
        self.cache.begin(slot, resident)
        self.cache.requests[slot] = self._grown(slot, length)
        if resident or rng.random() < 0.2:
            self.cache.truncate(slot, length, resident)
        return state

    def _store(self, slot: int) -> None:
        """Let the host have all tokens of a request that has appended some."""
        if slot < len(getattr(self, "slots", ())) and self.slots[slot].appends:
            self.cache.flush(slot)
            self.slots[slot].appends = False
            length = self.cache.requests[slot].length
            self.tokens[slot] = self.bench.host_tokens(slot)
            self._follow(slot, max(length - 1, 0), length)

    def _follow(self, slot: int, start: int, end: int) -> None:
        """Take what the host has of tokens of a request for the truth from now on."""
        size = self.group.page_tokens
        for page in self.bench.pages[slot, start // size : -(-end // size)].tolist():
            self.truth[page] = self.bench.store.entries[page].cpu()

    def _grown(self, slot: int, length: int) -> Request:
        """A request of N tokens, all of which are on the host and were in the ring."""
        tokens, resident = self.tokens[slot][:, :length], self.cache.requests[slot].resident
        return Request(tokens, resident, high=length, on_host=length)

    def _grow(self, slot: int) -> None:
        """Now and then end or grow a request; a lane that fits grows past its buffer only."""
        request, group, rng = self.cache.requests[slot], self.group, self.rng
        if rng.random() < 0.01:
            self.slots[slot] = self._begin(slot)
        elif rng.random() < 0.1:
            most = group.max_units * group.unit
            fits = self.cache.fits(request)
            least = (group.buffer_slots + 1) * group.unit + 1 if fits else 0
            longer = max(request.length + int(rng.integers(1, 2 * group.unit + 2)), least)
            if longer <= most:
                self._store(slot)
                self.cache.requests[slot] = self._grown(slot, longer)

    def _ids(self, slot: int, layer: int) -> np.ndarray:
        """Draw ids ``[lane_heads, K]``, of which a share is as in the step before."""
        group, rng, state = self.group, self.rng, self.slots[slot]
        length = self.cache.requests[slot].length
        old, closed = state.ids[layer], max(1, (length - 1) // group.unit)
        if state.how == 0:
            step = group.select - round(group.select * state.overlap)
            state.start += step * (layer == 0)
            row = (state.start + np.arange(group.select)) % closed
            return np.broadcast_to(row, old.shape)
        fresh = rng.integers(0, closed, old.shape)
        if state.how == 2:
            wild = rng.choice([-1, -2, closed, closed + 1, group.max_units, *INT32], old.shape)
            fresh = np.where(rng.random(old.shape) < 0.3, wild, fresh)
        ids: np.ndarray = np.where(rng.random(old.shape) < state.overlap, old, fresh)
        return ids

    def _batch(self) -> list[int]:
        """Slots in any order, some of them padded rows instead."""
        batch = self.rng.permutation(self.group.max_requests)
        slots: list[int] = np.where(self.rng.random(len(batch)) < 0.06, -1, batch).tolist()
        return slots

    def call(self) -> int:
        """Plan and load a random batch, in one layer, or in all of a step that verifies drafts;
        return its steps.

        Raises:
            AssertionError: the engine and the model disagree.
        """
        if self.rng.random() < VERIFIED:
            return self._verify()
        group, rng = self.group, self.rng
        layer = int(rng.integers(len(group.layers)))
        batch = self._batch()
        rows, wanted = [], []
        for slot in batch:
            if slot < 0:
                rows.append(Row())
                wanted.append(rng.integers(0, 4, (group.lane_heads, group.select)))
                continue
            self._grow(slot)
            ids = self.slots[slot].ids[layer] = self._ids(slot, layer)
            wanted.append(ids)
            request = self.cache.requests[slot]
            rows.append(Row(slot, request.length, request.high, False, request.resident))
        self.bench.put(rows)
        ids = np.concatenate(wanted)
        plan = self.cache.select(layer, rows, ids.tolist())
        self.cache.check_maps()
        self._check_loaded(layer, rows, plan)
        return len(ids)

    def _verify(self) -> int:
        """A step in which rows append any number of tokens, some of which are rejected."""
        group, rng, cache = self.group, self.rng, self.cache
        batch, most = self._batch(), group.max_units * group.unit
        counts, ids = [], [list[list[int]]() for _ in group.layers]
        for slot in batch:
            room = 0
            if slot >= 0:
                self._grow(slot)
                state, request = self.slots[slot], cache.requests[slot]
                if not state.appends:
                    cache.truncate(slot, request.length, request.resident)
                    state.appends = True
                room = min(self.most, most - request.length)
            counts.append(int(rng.integers(0, room + 1)))
            for layer, rows in enumerate(ids):
                chosen = self._ids(max(slot, 0), layer)
                rows += chosen.tolist()
        cache.decode(batch, ids, counts, self.most)
        for slot, count in zip(batch, counts, strict=True):
            if slot >= 0 and count:
                request = cache.requests[slot]
                begin = (request.length - count) // group.unit * group.unit
                if request.on_host > begin:
                    host = self.bench.host_tokens(slot)[:, begin : request.on_host]
                    true = request.tokens[:, begin : request.on_host]
                    assert torch.equal(raw(host), raw(true)), f"host bytes of slot {slot}"
                    self._follow(slot, begin, request.on_host)
                left = request.length - int(rng.integers(0, count + 1))
                if left and cache.can_roll_back(slot, left):
                    cache.rollback(slot, left)
        cache.check_maps()
        return len(ids) * len(ids[0])

    def _check_loaded(self, layer: int, rows: Sequence[Row], plan: dict[str, list[Any]]) -> None:
        """Check the bytes of the slots that were just loaded."""
        heads, per_page = self.group.lane_heads, self.group.units_per_page
        misses = (plan[name] for name in ("miss_hosts", "miss_slots", "misses"))
        loaded = [
            (rows[lane // heads].slot * heads + lane % heads, place, *divmod(host, per_page))
            for lane, (hosts, places, count) in enumerate(zip(*misses, strict=True))
            for host, place in zip(hosts[:count], places[:count], strict=True)
        ]
        if loaded:
            row, place, page, within = torch.tensor(loaded).T
            where = (row.to(self.device), place.to(self.device))
            kept = raw(self.bench.store.buffer[layer][where])
            true = raw(self.truth[page, layer, row % heads, within])
            wrong = (kept != true).flatten(1).any(1).nonzero()
            assert not len(wrong), f"bytes of layer {layer}, (row, slot, ..) {loaded[wrong[0]]}"
