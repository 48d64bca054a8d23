"""Part of ``topkv_testing.transfers``: every byte that moves between the tiers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from topkv_testing import strategies
from topkv_testing.kit import Data, KitTests, Subject, drawn
from topkv_testing.models.host_formats import CODED, formats_of
from topkv_testing.transfer.bench import Row, TransferBench, random_tokens, raw
from topkv_testing.transfer.cases import DTYPES, bench_of, cache_of, fetch, shapes


def _require_coded(subject: Subject) -> None:
    if CODED not in formats_of(subject.entry):
        pytest.skip(f"{subject.entry.name} does not state the host format {CODED!r}")


class MoveTests(KitTests):
    """Append, offload, chunks, flush, fetch and restore."""

    kind = "transfer"

    @drawn(
        cpu=12,
        interpret=4,
        gpu=12,
        row=strategies.row_formats(),
        unit=st.sampled_from([1, 2, 4]),
        seed=strategies.seeds(),
    )
    def test_row_formats_move_bytewise(
        self, subject: Subject, row: tuple[torch.dtype, int, int], unit: int, seed: int
    ) -> None:
        dtype, dim, planes = row
        while planes * unit * dim * dtype.itemsize % 16:
            unit *= 2
        shape: dict[str, Any] = {"dtype": dtype, "dim": dim, "unit": unit, "seed": seed}
        shape["planes"] = planes
        cache = cache_of(subject, slots=4, requests=2, units=12, lane_heads=1, **shape)
        cache.begin(1)
        cache.prefill(1, 9 * unit + unit // 2)
        for ids in ([3, 0, -1, 5], [4, 3, 1, 2], [6, 8, 0, 7]):
            cache.decode([1], [[ids]] * 2)
            cache.check()
        length = cache.requests[1].length
        cache.flush(1)
        fetched = fetch(cache.bench, 1, 1, 0, length)
        assert torch.equal(raw(fetched), raw(cache.requests[1].tokens[1])), "fetch"

    @drawn(
        cpu=30,
        interpret=10,
        residency=st.sampled_from(["sparse", "resident", "streamed"]),
        unit=st.sampled_from([1, 2, 4]),
        states=st.lists(st.tuples(st.integers(1, 16), st.booleans()), min_size=3, max_size=3),
        slots=st.permutations([0, 1, -1]),
        planes=st.sampled_from([1, 2]),
    )
    def test_append_writes_the_new_token_alone(
        self,
        subject: Subject,
        residency: str,
        unit: int,
        states: list[tuple[int, bool]],
        slots: list[int],
        planes: int,
    ) -> None:
        dense = residency != "sparse"
        shape: dict[str, Any] = {"residency": residency, "unit": unit, "units": 16}
        shape["planes"] = planes
        if dense:
            shape |= {"lane_heads": 1, "heads_per_lane": 2, "page_units": 1}
        bench = bench_of(subject, **shape)
        bench.put(
            [
                Row(slot, length, length, appended) if slot >= 0 else Row(appended=appended)
                for slot, (length, appended) in zip(slots, states, strict=True)
            ]
        )
        check_append(bench, slots, states)

    @drawn(
        cpu=30,
        interpret=8,
        unit=st.sampled_from([1, 2, 4]),
        slots=st.permutations([0, 1, -1]),
        states=st.lists(
            st.tuples(st.integers(0, 16), st.booleans(), st.booleans()),
            min_size=3,
            max_size=3,
        ),
    )
    def test_offload_moves_what_closed(
        self, subject: Subject, unit: int, slots: list[int], states: list[Any]
    ) -> None:
        """All layers at once, exactly the units that this step filled, for every mix of rows."""
        bench = bench_of(subject, unit=unit, slots=8, units=16)
        ring = bench.store.buffer[:, :, 8:]
        ring.copy_(random_tokens(ring.shape, ring.dtype, bench.generator))
        rows = [
            Row(slot, length, length, appended, resident) if slot >= 0 else Row()
            for slot, (length, appended, resident) in zip(slots, states, strict=True)
        ]
        bench.put(rows)
        expected = bench.store.entries.clone()
        closing = [r for r in rows if r.appended and r.length and r.length % unit == 0]
        for row in closing:
            page, within = divmod(bench.host_id(row.slot, row.length // unit - 1), 4)
            place = (row.length // unit - 1) % 2
            lanes = bench.store.lanes_of(row.slot)
            expected[page, :, :, within] = ring[:, lanes, place].cpu()
        here = [row.slot for row in closing]
        with bench.touching([r.slot for r in closing if r.resident], pages_of=here):
            bench.engine.offload()
        assert torch.equal(raw(bench.store.entries), raw(expected)), "the host after offload"
        for row in closing:
            fits = row.resident and (row.length - 1) // unit <= 8
            unit_of_row = row.length // unit - 1
            lanes = bench.store.lanes_of(row.slot)
            held = bench.store.unit_slot[:, lanes, unit_of_row]
            kept = unit_of_row if fits and unit_of_row < 8 else -1
            assert (held == kept).all(), f"unit {unit_of_row} belongs into slot {kept}"

    def test_a_unit_written_again_is_new_in_every_copy(self, subject: Subject) -> None:
        """A lane outgrows its buffer, which goes on holding the first units; the newest of these
        is rolled back and written again, by decoding or by a chunk, and then selected."""
        for again, resident in itertools.product(("decode", "chunk"), (True, False)):
            cache = cache_of(subject, slots=4, ring=3, lane_heads=1, requests=2)
            cache.begin(1, resident)
            cache.prefill(1, 5)
            for _ in range(6):  # 11 tokens: unit 5 is open, units 3 .. 5 are in the ring
                cache.decode([1])
            cache.check()
            cache.rollback(1, 7)  # in unit 3
            if again == "chunk":
                cache.prefill(1, 4)
            for _ in range(8):
                cache.decode([1])
            cache.check()
            for ids in ([0, 3, 2, 4], [3, 4, 1, -1]):
                cache.decode([1], [[ids]] * 2)
                cache.check()

    @drawn(
        cpu=25,
        interpret=6,
        shape=lambda subject: shapes(subject.tier.name),
        resident=st.booleans(),
    )
    def test_chunks_fetch_flush_and_restore(
        self, subject: Subject, data: Data, shape: dict[str, Any], resident: bool
    ) -> None:
        """Chunks longer than the ring and ends in mid-unit, against a list of tokens."""
        cache = cache_of(subject, **shape | {"units": 24})  # up to 22 tokens in units of one
        unit = cache.group.unit
        cache.begin(1, resident)
        for _ in range(data.draw(st.integers(1, 3))):
            cache.prefill(1, data.draw(st.integers(0, 4 * unit + 1)))
            for _ in range(data.draw(st.integers(0, 2))):
                cache.decode([1, -1])
            cache.check()
        cache.flush(1)
        cache.check()
        length = cache.requests[1].length
        start = data.draw(st.integers(0, length // unit)) * unit
        if start < length:
            for layer in cache.layers:
                fetched = fetch(cache.bench, layer, 1, start, length - start)
                true = cache.requests[1].tokens[layer, start:]
                assert torch.equal(raw(fetched), raw(true)), f"fetch from {start}"
        cache.truncate(1, data.draw(st.integers(0, length)), resident)
        cache.check()
        ids = [[list(range(cache.group.select))] * cache.group.lane_heads] * 2
        cache.decode([1], ids)
        cache.check()

    @drawn(
        cpu=20,
        interpret=4,
        gpu=20,
        needs=[_require_coded],
        dtype=st.sampled_from(DTYPES),
        dim=st.sampled_from([4, 12, 16, 48]),
        unit=st.sampled_from([1, 2, 4]),
        resident=st.booleans(),
        seed=strategies.seeds(),
    )
    def test_coded_entries_hold_what_was_rounded(
        self, subject: Subject, dtype: torch.dtype, dim: int, unit: int, resident: bool, seed: int
    ) -> None:
        """Rounded rows come back from coded entries bit for bit, by every way there and back:
        offload, chunk or flush; load, fetch or restore."""
        while 2 * unit * dim * dtype.itemsize % 16:
            unit *= 2
        shape: dict[str, Any] = {"dtype": dtype, "dim": dim, "unit": unit, "seed": seed}
        shape |= {"host_format": CODED, "heads_per_lane": 2}
        cache = cache_of(subject, slots=4, requests=2, units=16, **shape)
        cache.begin(1, resident)
        cache.prefill(1, 8 * unit + unit // 2)
        for ids in ([3, 0, -1, 5], [4, 3, 1, 2], [6, 2, 0, 7]):
            cache.decode([-1, 1], [[ids] * 4] * 2)
            cache.check()
        cache.flush(1)
        length = cache.requests[1].length
        for start in (0, 4 * unit):
            fetched = fetch(cache.bench, 1, 1, start, length - start)
            assert torch.equal(raw(fetched), raw(cache.requests[1].tokens[1, start:])), "fetch"
        cache.truncate(1, length - unit, resident)
        cache.check()
        cache.decode([1], [[[5, 1, 0, 2]] * 2] * 2)
        cache.check()

    def test_dense_layers_store_and_fetch(self, subject: Subject) -> None:
        dense = ("resident", "streamed")
        for residency, planes in itertools.product(dense, (1, 2)):
            shape: dict[str, Any] = {
                "planes": planes,
                "residency": residency,
                "unit": 4,
                "page_units": 1,
                "units": 6,
            }
            bench = bench_of(subject, lane_heads=1, heads_per_lane=2, **shape)
            tokens = random_tokens((21, 2, planes, 4), torch.float32, bench.generator)
            for start, end in ((0, 6), (6, 7), (7, 21)):
                with bench.touching(layers=[1], pages_of=[2]):
                    k, v = (tokens[start:end, :, i].contiguous() for i in (0, -1))
                    k, v = k.to(bench.device), v.to(bench.device)
                    bench.engine.store_chunk(bench.views[1], 2, start, k, v, end, False)
            assert torch.equal(raw(fetch(bench, 1, 2, 4, 17)), raw(tokens[4:])), residency


def check_append(bench: TransferBench, slots: list[int], states: list[tuple[int, bool]]) -> None:
    """Append random tokens in layer 1 and compare all memory with the expected bytes."""
    group, store = bench.group, bench.store
    heads, dim = group.num_kv_heads, group.head_dim
    # Rows and heads stand apart, as in slices of a fused projection.
    fused = random_tokens((len(slots), 1, heads, 2 * dim + 4), group.dtype, bench.generator)
    k, v = fused[..., :dim], fused[..., dim : 2 * dim]
    buffer, entries = store.buffer.clone(), store.entries.clone()
    for batch, (slot, (length, appended)) in enumerate(zip(slots, states, strict=True)):
        if slot < 0 or not appended:
            continue
        unit, offset = divmod(length - 1, group.unit)
        for head in range(heads):
            lane, inner = divmod(head, group.heads_per_lane)
            if group.residency == "sparse":
                place = group.buffer_slots + unit % group.ring_slots
                target = buffer[1, slot * group.lane_heads + lane, place, inner]
            else:
                page, within = divmod(bench.host_id(slot, unit), group.units_per_page)
                target = entries[page, 1, lane, within, inner]
            for plane, rows in zip(range(group.planes), (k, v), strict=False):
                target[plane, offset] = rows[batch, 0, head].to(target.device)
    fused = fused.to(bench.device)
    bench.engine.append(bench.views[1], fused[..., :dim], fused[..., dim : 2 * dim])
    bench.finish()
    assert torch.equal(raw(store.buffer), raw(buffer)), "the device buffer after append"
    assert torch.equal(raw(store.entries), raw(entries)), "the pages after append"
