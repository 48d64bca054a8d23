"""The plan of both implementations against an ordered model, id stream by id stream."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from topkv.kv.host_pool import entry_view
from topkv.kv.layout import LAYOUTS, lay_out
from topkv.kv.store import GroupStore
from topkv.testing.oracle import LaneModel
from topkv.transfer.engine import ZeroCopyTransfer
from topkv.transfer.eviction import LeastRecentlyUsed
from topkv.types import GroupShape, LayerView, Plan, StepTensors

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SENTINEL = -77


class Bench:
    """One group with its engine, a page table in random order, and host entries that tell."""

    def __init__(
        self,
        impl,
        *,
        select,
        slots,
        lane_heads=2,
        heads_per_lane=1,
        unit=2,
        ring=2,
        requests=3,
        units=24,
        layers=2,
        layout="page_head",
        dtype=torch.float32,
        seed=0,
    ):
        page_units = 4
        self.group = GroupShape(
            tuple(range(layers)),
            unit,
            lane_heads,
            heads_per_lane,
            4,
            dtype,
            page_units * unit,
            requests,
            units,
            select,
            slots,
            ring,
        )
        pages_each = -(-units // page_units)
        num_pages = 1 + requests * pages_each
        (strides,), size = lay_out([self.group], layout, num_pages)
        pool = torch.zeros(size, dtype=torch.uint8)
        if DEVICE.type == "cuda":
            pool = pool.pin_memory()
        entries = entry_view(pool, self.group, strides, num_pages)
        generator = torch.Generator().manual_seed(seed)
        entries.copy_(torch.randn(entries.shape, generator=generator).to(dtype))
        self.store = GroupStore.on_host(self.group, strides, pool, entries, DEVICE)
        table = 1 + torch.randperm(num_pages - 1, generator=generator).view(requests, pages_each)
        ints = {"dtype": torch.int32, "device": DEVICE}
        self.step = StepTensors(
            *(torch.zeros(requests, **ints) for _ in range(5)), table.to(**ints)
        )
        empty = torch.zeros(0)
        self.views = [LayerView(i, i, self.group, self.step, empty, empty) for i in range(layers)]
        self.engine = ZeroCopyTransfer(self.store, self.views, LeastRecentlyUsed(), impl)
        lanes = requests * lane_heads
        self.plan = Plan(
            *(
                torch.full(shape, SENTINEL, **ints)
                for shape in (
                    (lanes, select),
                    (lanes,),
                    (lanes, select),
                    (lanes, select),
                    (lanes,),
                )
            )
        )
        self.limit = torch.zeros(requests, **ints)

    def run(self, layer, slots, lengths, ids):
        """Plan and load one layer-step; ids is a list of id lists, one per lane."""
        group, step = self.group, self.step
        for tensor, values in (
            (step.slots, slots),
            (step.lengths, lengths),
            (step.high, lengths),
            (self.limit, [max(0, (n - 1) // group.unit) for n in lengths]),
        ):
            tensor.copy_(torch.tensor(values, dtype=torch.int32))
        for tensor in (
            self.plan.slots,
            self.plan.count,
            self.plan.miss_hosts,
            self.plan.miss_slots,
            self.plan.misses,
        ):
            tensor.fill_(SENTINEL)
        table = torch.tensor(ids, dtype=torch.int32, device=DEVICE)
        self.engine.plan(self.views[layer], table, self.limit, self.plan)
        self.engine.load(self.views[layer], self.plan)


def check_step(bench, models, layer, slots, lengths, ids):
    group, plan, store = bench.group, bench.plan, bench.store
    for lane in range(len(ids)):
        batch, head = divmod(lane, group.lane_heads)
        slot = slots[batch]
        if slot < 0:
            expected_slots, misses, units = [], [], []
        else:
            row = slot * group.lane_heads + head
            model = models[layer, row]
            limit = max(0, (lengths[batch] - 1) // group.unit)
            low = max(0, limit - group.ring_slots + 1)
            units, misses = model.select(ids[lane], limit, low)
            expected_slots = [
                group.buffer_slots + unit % group.ring_slots
                if unit >= low
                else model.unit_in.index(unit)
                for unit in units
            ]
            assert store.order[layer, row].tolist() == model.order
            assert store.slot_unit[layer, row].tolist() == [
                -1 if unit is None else unit for unit in model.unit_in
            ]
            for unit, place in misses:
                page = int(bench.step.page_table[slot, unit // group.units_per_page])
                source = store.entries[page, layer, head, unit % group.units_per_page]
                assert torch.equal(store.buffer[layer, row, place].cpu(), source)
        pad = group.select - len(units)
        assert plan.slots[lane].tolist() == expected_slots + [-1] * pad
        assert int(plan.count[lane]) == len(units)
        gap = [-1] * (group.select - len(misses))
        table = bench.step.page_table[slot].tolist()
        per_page = group.units_per_page
        hosts = [table[unit // per_page] * per_page + unit % per_page for unit, _ in misses]
        assert plan.miss_hosts[lane].tolist() == hosts + gap
        assert plan.miss_slots[lane].tolist() == [place for _, place in misses] + gap
        assert int(plan.misses[lane]) == len(misses)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_plan_and_load_follow_the_ordered_model(impl, layout):
    @settings(max_examples=25, deadline=None)
    @given(st.data())
    def check(data):
        select = data.draw(st.integers(1, 9))
        bench = Bench(
            impl,
            select=select,
            slots=data.draw(st.integers(select, 12)),
            lane_heads=data.draw(st.sampled_from([1, 2, 3])),
            heads_per_lane=data.draw(st.sampled_from([1, 2])),
            unit=data.draw(st.sampled_from([1, 2, 4])),
            ring=data.draw(st.sampled_from([2, 3])),
            layout=layout,
            seed=data.draw(st.integers(0, 9)),
        )
        group = bench.group
        models = {
            (layer, row): LaneModel(group.buffer_slots)
            for layer in range(2)
            for row in range(group.rows)
        }
        one = st.one_of(st.integers(-3, 30), st.sampled_from([-1, 2**31 - 1, -(2**31)]))
        for _ in range(data.draw(st.integers(1, 5))):
            slots = data.draw(st.permutations([0, 1, -1]))
            lengths = [
                data.draw(st.integers(1, 24 * group.unit)) if slot >= 0 else 0 for slot in slots
            ]
            ids = data.draw(
                st.lists(
                    st.lists(one, min_size=select, max_size=select),
                    min_size=3 * group.lane_heads,
                    max_size=3 * group.lane_heads,
                )
            )
            layer = data.draw(st.integers(0, 1))
            # Ring bounds only ever move on; a lane that falls back has been reset.
            for slot, length in zip(slots, lengths, strict=True):
                if slot >= 0 and length < bench_high(bench).get(slot, 0):
                    bench.engine.reset(slot)
                    for where, model in models.items():
                        if where[1] // group.lane_heads == slot:
                            model.reset()
                if slot >= 0:
                    bench_high(bench)[slot] = length
            bench.run(layer, slots, lengths, ids)
            check_step(bench, models, layer, slots, lengths, ids)

    check()


def bench_high(bench):
    if not hasattr(bench, "high_of"):
        bench.high_of = {}
    return bench.high_of


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_no_row_touches_another(impl):
    bench = Bench(impl, select=4, slots=5)
    bench.run(0, [1, -1, -1], [48, 0, 0], [[0, 1, 2, 3]] * 6)
    untouched = [row for row in range(bench.group.rows) if row not in (2, 3)]
    assert (bench.store.slot_unit[0, untouched] == -1).all()
    assert (bench.store.slot_unit[1] == -1).all()
    assert (bench.store.buffer[0, untouched] == 0).all()


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_persistent_duplicates_do_not_grow_occupancy(impl):
    bench = Bench(impl, select=6, slots=6)
    for _ in range(4):
        bench.run(0, [0, -1, -1], [48, 0, 0], [[7, 7, 3, 7, 3, 3]] * 6)
        assert bench.plan.count[0] == 2
        assert (bench.store.slot_unit[0, 0] >= 0).sum() == 2


def overlapping(generator, universe, previous, width, overlap):
    """A selection of ``width`` ids that shares ``overlap`` of them with the previous one."""
    keep = previous[torch.randperm(width, generator=generator)[: round(width * overlap)]]
    rest = torch.randperm(universe, generator=generator)
    fresh = rest[~torch.isin(rest, previous)][: width - len(keep)]
    return torch.cat([keep, fresh])


def test_a_trace_of_85_percent_overlap_hits_at_least_80_percent():
    """Default proportions: buffer twice the selection. The figure is the one of the seed."""
    width, universe = 127, 2048
    bench = Bench(
        "reference",
        select=width,
        slots=256,
        lane_heads=1,
        unit=1,
        units=universe,
        requests=1,
        layers=1,
        ring=2,
    )
    generator = torch.Generator().manual_seed(1)
    ids = torch.randperm(universe - 4, generator=generator)[:width]
    for _ in range(100):
        bench.run(0, [0], [universe], [ids.tolist()])
        ids = overlapping(generator, universe - 4, ids, width, 0.85)
    hits, misses = bench.store.counters[0, 0].tolist()
    assert hits / (hits + misses) >= 0.80
