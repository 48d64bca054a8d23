"""Part of ``topkv_testing.transfers``: slots of units, and the order of eviction."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from topkv_testing import strategies
from topkv_testing.kit import Data, KitTests, Subject, drawn
from topkv_testing.transfer.bench import Row, raw
from topkv_testing.transfer.cases import bench_of, cache_of, shapes


class PlanTests(KitTests):
    """Plans, loads, and the maps that they leave."""

    kind = "transfer"

    @drawn(cpu=40, interpret=8, gpu=30, shape=lambda subject: shapes(subject.tier.name))
    def test_plan_and_load_follow_the_ordered_model(
        self, subject: Subject, data: Data, shape: dict[str, Any]
    ) -> None:
        cache = cache_of(subject, **shape)
        group = cache.group
        slots = range(group.max_requests)
        for slot in slots:
            cache.begin(slot)
            cache.prefill(slot, data.draw(st.integers(0, 8 * group.unit)))
        for _ in range(data.draw(st.integers(1, 4))):
            batch = data.draw(strategies.batches(slots, group.max_requests))
            limit = data.draw(st.integers(0, 10))
            wanted = strategies.adversarial_ids(limit, group.select)
            ids = [
                [data.draw(wanted) for _ in range(len(batch) * group.lane_heads)]
                for _ in cache.layers
            ]
            cache.decode(batch, ids)
            cache.check()

    def test_persistent_duplicates_do_not_grow_occupancy(self, subject: Subject) -> None:
        bench = bench_of(subject, select=6, slots=7, requests=2, lane_heads=1, layers=1)
        row = Row(1, 48, 48)
        for step, ids in enumerate([[7, 7, 3, 7, 3, 3], [3] * 6, [7, -1, 7, -1, 3, 99]] * 3):
            bench.put([row])
            plan = bench.run(0, [ids])
            expected = {"count": [1 if ids == [3] * 6 else 2], "misses": [0 if step else 2]}
            actual = {name: plan[name] for name in expected}
            assert actual == expected, f"step {step}, ids {ids}: {actual}"
            held = sorted(bench.store.slot_unit[0, 1].tolist())
            assert held == [-1] * 5 + [3, 7], f"occupancy after step {step}: {held}"

    def test_ids_out_of_range_are_dropped_wherever_they_stand(self, subject: Subject) -> None:
        outside = [-1, -2, 9, 10, 24, 2**20, 2**31 - 1, -(2**31)]
        cache = cache_of(subject, select=4, slots=6, requests=1, lane_heads=len(outside), layers=1)
        cache.begin(0)
        cache.prefill(0, 19)  # units 0 .. 8 are closed
        for place, low in itertools.product(range(4), (0, 4)):
            inside = [low, low + 2, low + 4]
            ids = [[*inside[:place], wild, *inside[place:]] for wild in outside]
            cache.decode([0], [ids], [False])
            counts = cache.bench.plan.count.tolist()
            assert counts == [3] * len(outside), f"counts {counts} of {ids}"
            cache.check()
        ids = [[wild] * 4 for wild in outside]
        cache.decode([0], [ids], [False])
        assert not cache.bench.plan.count.any(), "an id out of range was counted"

    def test_limits_are_those_of_the_row(self, subject: Subject) -> None:
        """Selectable units are those below ``limit``, closed units or all tokens."""
        bench = bench_of(subject, select=5, slots=5, unit=1, requests=3, lane_heads=1, layers=1)
        for limit in (0, 1, 8, 9, 10):
            bench.put([Row(0, 10, 10, limit=limit), Row(), Row(2, 10, 10, limit=10 - limit)])
            counts = bench.run(0, [[0, 3, 7, 8, 9]] * 3)["count"]
            expected = [sum(unit < n for unit in (0, 3, 7, 8, 9)) for n in (limit, 10 - limit)]
            assert counts == [expected[0], 0, expected[1]], f"counts {counts} at limit {limit}"

    def test_what_is_selected_is_not_evicted(self, subject: Subject) -> None:
        """Hits keep their slots, however full the buffer is; judged by the maps alone."""
        steps = 12 if subject.tier.name == "interpret" else 40
        bench = bench_of(subject, select=5, slots=5, requests=1, lane_heads=2, layers=1)
        streams = [strategies.selections(20, 5, 0.6, how, 3) for how in ("sliding", "jumping")]
        before: list[dict[int, int]] = [{}, {}]
        for _ in range(steps):
            bench.put([Row(0, 48, 48)])
            ids = [next(stream) for stream in streams]
            plan = bench.run(0, ids)
            for lane, wanted in enumerate(ids):
                place = dict(zip(wanted, plan["slots"][lane], strict=True))
                assert len(set(place.values())) == 5, f"two units in one slot: {place}"
                for unit in set(wanted) & set(before[lane]):
                    assert place[unit] == before[lane][unit], "a selected unit was moved"
                held = bench.store.slot_unit[0, lane].tolist()
                kept = all(held[slot] == unit for unit, slot in place.items())
                assert kept, f"{place} was planned and {held} is held"
                before[lane] = place

    def test_padded_rows_change_nothing(self, subject: Subject) -> None:
        bench = bench_of(subject)
        for batch in (1, 3):
            bench.put([Row(appended=True, resident=True, limit=9)] * batch)
            with bench.touching():
                plan = bench.run(1, [[0, 1, 2, 3]] * (2 * batch))
                k = torch.ones((batch, 1, 2, 4), device=bench.device)
                bench.engine.append(bench.views[0], k, k)
                bench.engine.offload()
            for name, values in plan.items():
                empty = 0 if name in ("count", "misses") else [-1] * 4
                assert values == [empty] * (2 * batch), f"plan.{name} of padded rows: {values}"

    def test_result_does_not_depend_on_the_batch(self, subject: Subject) -> None:
        """Lanes get equal plans in another order, among padding, in batches of another size."""
        steps = 2 if subject.tier.name == "interpret" else 12
        generator = torch.Generator().manual_seed(7)
        orders = [[0, 1, 2], [2, -1, 0, -1, 1], [1, 0, 2, -1]]
        benches = [bench_of(subject, requests=5, slots=6, page_units=1) for _ in orders]
        for _ in range(steps):
            ids = torch.randint(-1, 24, (3, 2, 4), generator=generator).tolist()
            results = []
            for order, bench in zip(orders, benches, strict=True):
                bench.put([Row(slot, 48, 48) if slot >= 0 else Row() for slot in order])
                lanes = [lane for slot in order for lane in ids[max(slot, 0)]]
                plan = bench.run(0, lanes)
                at = [order.index(slot) * 2 + head for slot in range(3) for head in range(2)]
                results.append({name: [plan[name][lane] for lane in at] for name in plan})
            assert results[0] == results[1] == results[2], "plans differ by batch"
            stores = [bench.store for bench in benches]
            for name in ("order", "slot_unit", "unit_slot", "buffer"):
                first, *others = (raw(getattr(store, name)) for store in stores)
                assert all(torch.equal(first, other) for other in others), name

    def test_lengths_around_ring_and_buffer(self, subject: Subject) -> None:
        """A request grows token by token past its ring and past its buffer, beside a padded row
        and a request that starts with an LRU buffer."""
        most = 8 if subject.tier.name == "interpret" else 11

        @settings(max_examples=4 if most == 11 else 1, deadline=None, phases=[Phase.generate])
        @given(st.sampled_from([1, 2]), st.sampled_from([2, 3]), st.sampled_from([4, 5]))
        def check(unit: int, ring: int, slots: int) -> None:
            shape: dict[str, Any] = {"unit": unit, "ring": ring, "slots": slots, "lane_heads": 1}
            cache = cache_of(subject, requests=3, layers=1, **shape)
            cache.begin(2, resident=True)
            cache.begin(0, resident=False)
            for length in range(1, most * unit + 1):
                newest = (length - 1) // unit
                last = [newest - 1, newest - 2, newest - ring, newest]
                old = [0, 1, newest - ring + 1, slots]
                cache.decode([2, -1, 0], [[last, last, old if length % 2 else last]])
                cache.check()
                if newest <= slots:
                    assert cache.bench.plan.misses[0] == 0, "a lane that fits has no misses"
            cache.flush(2)
            cache.check()

        check()

    def test_wide_selections(self, subject: Subject) -> None:
        """The widest selection that a configuration may ask for, all of it missed, then hit."""
        wide = 2**15 - 1
        shape: dict[str, Any] = {
            "select": wide,
            "slots": wide + 1,
            "units": 2**15 + 8,
            "page_units": 8,
        }
        if subject.tier.name == "cpu":  # the reference takes a while for each unit
            shape = {"select": 500, "slots": 512, "units": 1024, "page_units": 8}
        width = shape["select"]
        shape |= {"unit": 1, "dim": 2, "lane_heads": 1, "requests": 1, "layers": 1}
        bench = bench_of(subject, **shape)
        units = shape["units"]
        order = torch.randperm(units - 4, generator=bench.generator)[:width].tolist()
        for step in range(2):
            bench.put([Row(0, units, units)])
            plan = bench.run(0, [order])
            assert plan["count"] == [width], f"count {plan['count']}"
            assert plan["misses"] == [0 if step else width], f"misses {plan['misses']}"
            assert plan["slots"] == [list(range(width))], "free slots are taken in order"
        truth = bench.host_tokens(0)[0, order]
        held = bench.store.buffer[0, 0, :width].cpu()
        assert torch.equal(raw(held.squeeze(3)), raw(truth)), "bytes of a wide selection"

    def test_a_reused_slot_remembers_nothing(self, subject: Subject) -> None:
        for way in ("reset", "restore"):
            cache = cache_of(subject, select=3, slots=4, requests=2, layers=1, lane_heads=1)
            cache.begin(0)
            cache.prefill(0, 40)
            for ids in ([0, 1, 2], [3, 1, 0]):
                cache.decode([0], [[ids]])
            if way == "reset":
                cache.begin(0)
                cache.prefill(0, 30)
            else:
                cache.truncate(0, 30, False)
            cache.check()
            for ids in ([2, 0, 3], [5, 6, 7], [1, 2, 8]):
                cache.decode([0], [[ids]])
                cache.check()
