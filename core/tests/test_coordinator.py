"""The whole life of requests against an ordered model and attention over explicit tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from topkv.config import SparseConfig, lower
from topkv.coordinator import SparseCoordinator
from topkv.errors import ConfigError, HostMemoryError, RequestError
from topkv.kv.layout import LAYOUTS
from topkv.plugins import PluginRegistry
from topkv.testing.doubles import Entries
from topkv.testing.oracle import LaneModel, attention
from topkv.types import ModelShape

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 4, 4
MODEL = ModelShape(LAYERS, HEADS, KV_HEADS, DIM, torch.float32, DIM**-0.5)


def make(impl="reference", **options):
    """Two sparse layers around a resident and a streamed one."""
    config = SparseConfig(
        **{
            "algorithm": "scripted",
            "backend": "gather",
            "impl": impl,
            "unit": 2,
            "budget": 8,
            "buffer": 10,
            "ring_tokens": 4,
            "page_tokens": 4,
            "max_requests": 4,
            "max_tokens": 96,
            "max_request_tokens": 48,
            "layers": {"1": "resident", "2": "streamed"},
            "poison": True,
            "prefill_block_tokens": 8,
            **options,
        }
    )
    registry = PluginRegistry([("topkv-doubles", "1", Entries())])
    lowered = lower(config, MODEL, device=DEVICE, registry=registry)
    return SparseCoordinator(lowered, registry)


class Truth:
    """What a request's tokens are, layer by layer, and what its lanes must look like."""

    def __init__(self, lanes):
        self.k = torch.zeros(LAYERS, 0, KV_HEADS, DIM)
        self.v = torch.zeros(LAYERS, 0, KV_HEADS, DIM)
        self.high = 0
        self.dirty = self.settled = False
        self.lanes = lanes

    @property
    def length(self):
        return self.k.shape[1]

    def append(self, k, v):
        self.k, self.v = torch.cat([self.k, k], 1), torch.cat([self.v, v], 1)
        self.high = max(self.high, self.length)

    def cut(self, length):
        self.k, self.v = self.k[:, :length], self.v[:, :length]


class Machine(RuleBasedStateMachine):
    impl = "reference"

    @initialize(
        layout=st.sampled_from(LAYOUTS),
        scope=st.sampled_from(["kv_head", "shared"]),
        unit=st.sampled_from([1, 2, 4]),
        fast=st.booleans(),
        buffer=st.sampled_from([12, 16, 24]),
    )
    def start(self, layout, scope, unit, fast, buffer):
        self.coordinator = make(
            self.impl,
            host_layout=layout,
            scope=scope,
            unit=unit,
            resident_fast_path=fast,
            budget=12,
            buffer=buffer,
            ring_tokens=2 * unit if unit > 1 else 3,
        )
        self.group = self.coordinator.layers[0].view.group
        self.fast = fast
        self.generator = torch.Generator().manual_seed(0)
        self.live: dict[int, Truth] = {}
        self.begin()

    def teardown(self):
        if hasattr(self, "coordinator"):
            self.coordinator.forward_abort()
            for slot in np.flatnonzero(self.coordinator.tracker.active).tolist():
                self.coordinator.request_end(slot)
            self.coordinator.check_integrity()
            assert self.coordinator.manager.host.used == 0
            assert self.coordinator.tracker.free == 4
            self.coordinator.close()

    # Helpers.

    def random(self, *shape):
        return torch.randn(shape, generator=self.generator)

    def fits(self, truth):
        return self.fast and (truth.high - 1) // self.group.unit <= self.group.buffer_slots

    def claim(self, truth, units):
        """A lane that fits holds unit u in slot u."""
        if self.fits(truth):
            for lane in truth.lanes.values():
                for unit in units:
                    if unit < self.group.buffer_slots:
                        lane.unit_in[unit] = unit

    def flushed(self, truth):
        """Decode has left an open unit that only the ring holds; it moves on."""
        if truth.dirty and truth.length:
            self.claim(truth, [(truth.length - 1) // self.group.unit])
        truth.dirty = False

    def restored(self, truth):
        truth.high = truth.length
        for lane in truth.lanes.values():
            lane.reset()
        self.claim(truth, range(math.ceil(truth.length / self.group.unit)))

    def new_truth(self):
        heads = range(self.group.lane_heads)
        capacity = self.group.buffer_slots
        return Truth({(layer, head): LaneModel(capacity) for layer in (0, 3) for head in heads})

    def slot(self, data):
        return data.draw(st.sampled_from(sorted(self.live)))

    def forward(self, q, k, v):
        outs = []
        for layer in range(LAYERS):
            tensors = (q[layer], k[layer], v[layer])
            outs.append(self.coordinator.attention(layer, *(t.to(DEVICE) for t in tensors)).cpu())
        return outs

    # Rules.

    @precondition(lambda self: len(self.live) < 4)
    @rule()
    def begin(self):
        self.live[self.coordinator.request_begin()] = self.new_truth()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data):
        slot = self.slot(data)
        self.coordinator.request_end(slot)
        del self.live[slot]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.integers(0, 17), abort=st.booleans())
    def prefill(self, data, tokens, abort):
        self.prefill_chunk(self.slot(data), tokens, abort)

    def prefill_chunk(self, slot, tokens, abort=False):
        truth = self.live[slot]
        start = truth.length
        try:
            self.coordinator.forward_begin(prefill=[(slot, tokens)])
        except HostMemoryError:
            assert start + tokens > 48 or self.coordinator.manager.host.free * 4 < tokens + 4
            return
        self.flushed(truth)
        q = self.random(LAYERS, tokens, HEADS, DIM)
        k, v = (self.random(LAYERS, tokens, KV_HEADS, DIM) for _ in range(2))
        outs = self.forward(q, k, v)
        if abort:
            self.coordinator.forward_abort()
            self.restored(truth)
            return
        self.coordinator.forward_end()
        truth.append(k, v)
        self.claim(
            truth,
            range(start // self.group.unit, math.ceil(truth.length / self.group.unit))
            if tokens
            else (),
        )
        mask = torch.arange(truth.length)[None] <= start + torch.arange(tokens)[:, None]
        for layer in range(LAYERS):
            expected, _ = attention(q[layer], truth.k[layer], truth.v[layer], MODEL.scale, mask)
            torch.testing.assert_close(outs[layer].double(), expected, rtol=1e-4, atol=1e-5)

    @precondition(lambda self: any(t.length for t in self.live.values()))
    @rule(data=st.data(), steps=st.integers(1, 9), widest=st.sampled_from([4, 12, 50]))
    def decode(self, data, steps, widest):
        slots = [slot for slot, truth in self.live.items() if truth.length]
        rows = data.draw(st.permutations([*slots, *([-1] * (4 - len(slots)))]))
        ending = data.draw(st.sampled_from([None, None, None, *slots]))
        for step in range(steps):
            last = step == steps - 1
            if not self.decode_once(rows, widest, ending if last else None):
                return

    @precondition(lambda self: any(t.length for t in self.live.values()))
    @rule(data=st.data(), steps=st.integers(1, 8), back=st.integers(1, 5), abort=st.booleans())
    def speculate(self, data, steps, back, abort):
        """Decode, take some of it back, decode again."""
        slot = data.draw(st.sampled_from([s for s, t in self.live.items() if t.length]))
        for _ in range(steps):
            self.decode_alone(slot)
        self.decode_alone(slot, abort=abort)
        self.roll_back(slot, back)
        if self.live[slot].length:
            for _ in range(back + 2 * self.group.unit):
                self.decode_alone(slot)

    @precondition(lambda self: any(t.length for t in self.live.values()))
    @rule(data=st.data(), steps=st.integers(1, 5), tokens=st.integers(1, 9))
    def turn(self, data, steps, tokens):
        """Decode, append a prompt, decode on until the ring has moved past it."""
        slot = data.draw(st.sampled_from([s for s, t in self.live.items() if t.length]))
        for _ in range(steps):
            self.decode_alone(slot)
        self.prefill_chunk(slot, tokens)
        for _ in range(2 * self.group.unit):
            self.decode_alone(slot)

    def decode_alone(self, slot, abort=False):
        """One row, whose ids lie close together: every unit of the request is met often."""
        widest = self.live[slot].length // self.group.unit + 2
        self.decode_once([slot, -1, -1, -1], widest, abort=abort)

    def decode_once(self, rows, widest, ending=None, abort=False):
        slots = [slot for slot in rows if slot >= 0]
        lanes = 4 * self.group.lane_heads
        ids = {
            layer: torch.randint(-2, widest, (lanes, self.group.select), generator=self.generator)
            .to(torch.int32)
            .to(DEVICE)
            for layer in (0, 3)
        }
        try:
            self.coordinator.forward_begin(decode=rows)
        except HostMemoryError:
            lengths = [self.live[slot].length for slot in slots]
            assert max(lengths) >= 48 or self.coordinator.manager.host.free < len(slots)
            return False
        for slot in slots:
            if not self.live[slot].settled:
                self.flushed(self.live[slot])
                self.live[slot].settled = True
        for layer in (0, 3):
            self.coordinator.layers[layer].algorithm.next_ids = ids
        q = self.random(LAYERS, 4, HEADS, DIM)
        k, v = (self.random(LAYERS, 4, KV_HEADS, DIM) for _ in range(2))
        outs = self.forward(q, k, v)
        for layer in (0, 3):
            self.coordinator.layers[layer].algorithm.next_ids = {}
        if abort:
            self.coordinator.forward_abort()
            for batch, slot in enumerate(rows):
                if slot >= 0:
                    truth = self.live[slot]
                    truth.high = max(truth.high, truth.length + 1)
                    for layer in (0, 3):
                        self.selected(truth, layer, batch, ids, truth.length + 1)
            return True
        if ending is not None:
            self.coordinator.request_end(ending)
        self.coordinator.forward_end()
        for batch, slot in enumerate(rows):
            if slot < 0:
                assert all((out[batch] == 0).all() for out in outs)
                continue
            truth = self.live[slot]
            truth.append(k[:, batch, None], v[:, batch, None])
            truth.dirty = True
            for layer in range(LAYERS):
                mask = self.selected(truth, layer, batch, ids)
                expected, _ = attention(
                    q[layer, batch, None], truth.k[layer], truth.v[layer], MODEL.scale, mask
                )
                actual = outs[layer][batch, None].double()
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
            if truth.length % self.group.unit == 0:
                self.claim(truth, [truth.length // self.group.unit - 1])
        if ending is not None:
            del self.live[ending]
        return True

    def selected(self, truth, layer, batch, ids, length=None):
        """Which tokens each query head attends, by the model; moves the model's lanes on."""
        group, length = self.group, length or truth.length
        mask = torch.zeros(1, HEADS, length, dtype=torch.bool)
        if layer in (1, 2):
            return ~mask
        limit = (length - 1) // group.unit
        low = max(0, (truth.high - 1) // group.unit - group.ring_slots + 1)
        for head in range(group.lane_heads):
            chosen = ids[layer][batch * group.lane_heads + head].tolist()
            lane = truth.lanes[layer, head]
            if self.fits(truth):
                units = [unit for unit in dict.fromkeys(chosen) if 0 <= unit < limit]
            else:
                units, _ = lane.select(chosen, limit, low)
            heads = HEADS // group.lane_heads
            rows = slice(head * heads, (head + 1) * heads)
            for unit in [*units, limit]:
                mask[0, rows, unit * group.unit : (unit + 1) * group.unit] = True
        return mask

    @precondition(lambda self: self.live)
    @rule(data=st.data(), back=st.integers(0, 9))
    def rollback(self, data, back):
        self.roll_back(self.slot(data), back)

    def roll_back(self, slot, back):
        truth = self.live[slot]
        length = max(0, truth.length - back)
        low = max(0, (truth.high - 1) // self.group.unit - self.group.ring_slots + 1)
        if low and (length - 1) // self.group.unit < low:
            with pytest.raises(RequestError, match="behind the ring"):
                self.coordinator.rollback(slot, length)
            return
        self.coordinator.rollback(slot, length)
        truth.cut(length)
        truth.dirty = True

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def truncate(self, data):
        slot = self.slot(data)
        truth = self.live[slot]
        length = data.draw(st.integers(0, truth.length))
        self.coordinator.truncate(slot, length)
        truth.cut(length)
        truth.dirty = False
        self.restored(truth)

    @precondition(lambda self: 0 < len(self.live) < 4)
    @rule(data=st.data())
    def fork(self, data):
        slot = self.slot(data)
        truth = self.live[slot]
        try:
            twin = self.coordinator.fork(slot)
        except HostMemoryError:
            assert self.coordinator.manager.host.free == 0
            return
        self.flushed(truth)
        copy = self.new_truth()
        copy.k, copy.v, copy.settled = truth.k, truth.v, truth.settled
        self.restored(copy)
        self.live[twin] = copy
        for pool in self.coordinator.manager.representations:
            if "turns" in pool.pools:
                assert torch.equal(pool.pools["turns"][:, slot], pool.pools["turns"][:, twin])

    @invariant()
    def everything_is_in_place(self):
        if not hasattr(self, "coordinator"):
            return
        self.coordinator.check_integrity()
        store = self.coordinator.manager.stores[0]
        for slot, truth in self.live.items():
            assert self.coordinator.length(slot) == truth.length
            for (layer, head), lane in truth.lanes.items():
                index = self.coordinator.layers[layer].view.index
                row = slot * self.group.lane_heads + head
                assert store.order[index, row].tolist() == lane.order
                units = [None if u < 0 else u for u in store.slot_unit[index, row].tolist()]
                assert units == lane.unit_in
            self.closed_units_are_true(slot, truth)

    def closed_units_are_true(self, slot, truth):
        """Host entries, device copies and representations of every closed unit."""
        store, group = self.coordinator.manager.stores[0], self.group
        for layer in (0, 3):
            view = self.coordinator.layers[layer].view
            for unit in range((truth.length - 1) // group.unit):
                tokens = slice(unit * group.unit, (unit + 1) * group.unit)
                both = torch.stack([truth.k[layer, tokens], truth.v[layer, tokens]])
                entries = both.permute(2, 0, 1, 3).unflatten(0, (group.lane_heads, -1))
                page = self.coordinator.tracker.pages[slot][unit // group.units_per_page]
                place = unit % group.units_per_page
                assert torch.equal(store.entries[page, view.index, :, place], entries)
                sums = view.pools["sums"][page * group.units_per_page + place].cpu()
                torch.testing.assert_close(sums, truth.k[layer, tokens].sum(0))
                for head, row in enumerate(range(*store.rows_of(slot).indices(group.rows))):
                    held = int(store.unit_slot[view.index, row, unit])
                    if held >= 0:
                        assert torch.equal(
                            store.buffer[view.index, row, held].cpu(), entries[head]
                        )

    @invariant()
    def freed_memory_is_poisoned(self):
        if not hasattr(self, "coordinator"):
            return
        manager = self.coordinator.manager
        held = {page for pages in self.coordinator.tracker.pages for page in pages}
        freed = [p for p in manager.host._free if p not in held]
        touched = getattr(self, "touched", set())
        for page in touched & set(freed):
            assert all(torch.isnan(store.entries[page]).all() for store in manager.stores)
        self.touched = touched | held


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_lifecycle(impl):
    machine = type("Chosen", (Machine,), {"impl": impl})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=200 if impl == "reference" and DEVICE.type == "cpu" else 12,
            stateful_step_count=25,
            deadline=None,
        ),
    )


def started(**options):
    """A machine with one request, driven by hand."""
    machine = Machine()
    machine.start(
        **{
            "layout": "page_head",
            "scope": "kv_head",
            "unit": 4,
            "fast": True,
            "buffer": 24,
            **options,
        }
    )
    return machine


def test_a_prompt_fills_up_the_unit_that_decode_began():
    machine = started()
    machine.prefill_chunk(0, 4)
    for _ in range(2):
        machine.decode_alone(0)
    machine.prefill_chunk(0, 6)
    for _ in range(6):
        machine.decode_alone(0)
        machine.everything_is_in_place()
    machine.teardown()


def test_can_admit_names_every_reason():
    coordinator = make()
    assert coordinator.can_admit(48, 2)
    answer = coordinator.can_admit(49, 5)
    assert not answer
    assert len(answer.reasons) == 3
    coordinator.close()


def test_reserve_refuses_and_changes_nothing():
    coordinator = make()
    slots = [coordinator.request_begin() for _ in range(3)]
    coordinator.reserve(slots[0], 48)
    coordinator.reserve(slots[1], 48)
    with pytest.raises(HostMemoryError, match="pages of the host pool are needed"):
        coordinator.reserve(slots[2], 48)
    coordinator.check_integrity()
    assert coordinator.tracker.pages[slots[2]] == []
    coordinator.close()


def test_padded_rows_and_rows_that_append_nothing_change_nothing():
    coordinator = make()
    slot = coordinator.request_begin()
    generator = torch.Generator().manual_seed(0)

    def tokens(count, heads):
        return torch.randn(count, heads, DIM, generator=generator).to(DEVICE)

    coordinator.forward_begin(prefill=[(slot, 9)])
    for layer in range(LAYERS):
        coordinator.attention(layer, tokens(9, HEADS), tokens(9, KV_HEADS), tokens(9, KV_HEADS))
    coordinator.forward_end()
    store = coordinator.manager.stores[0]
    before = [t.clone() for t in (store.buffer, store.entries, store.unit_slot, store.order)]
    rows = np.array([-1, slot])
    coordinator.forward_begin(decode=rows, append=[False, False])
    for layer in range(LAYERS):
        out = coordinator.attention(
            layer, tokens(2, HEADS), tokens(2, KV_HEADS), tokens(2, KV_HEADS)
        )
        assert (out[0] == 0).all()
        assert out[1].isfinite().all()
    coordinator.forward_end()
    after = (store.buffer, store.entries, store.unit_slot, store.order)
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=0, equal_nan=True)
    assert coordinator.length(slot) == 9
    coordinator.close()


def test_a_tail_that_competes_takes_its_share_of_the_budget():
    coordinator = make(unit=1, budget=8, buffer=8, ring_tokens=3, params={"tail": "selectable"})
    lanes = coordinator.layers[0].lanes
    coordinator.forward_begin(decode=[-1])
    assert lanes.table.shape[1] == lanes.ids.shape[1] == 8
    coordinator.forward_end()
    coordinator.close()
    with pytest.raises(ConfigError, match="raise buffer to at least 8"):
        make(unit=1, budget=8, buffer=7, ring_tokens=3, params={"tail": "selectable"})


def test_observers_see_each_forward_once(caplog):
    coordinator = make()
    with caplog.at_level("DEBUG", logger="topkv"):
        coordinator.forward_begin(decode=[-1, -1])
        coordinator.forward_end()
    assert [record.message for record in caplog.records] == [
        "forward of 0 decode rows and 0 prompt tokens",
        "forward ended",
    ]
    coordinator.close()
