"""Part of ``topkv_testing.transfers``: rows that append several tokens in a step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topkv_testing.kit import KitTests, Subject, examples
from topkv_testing.transfer.bench import Row, raw
from topkv_testing.transfer.cases import bench_of, cache_of, shapes

MOST = 5
"""Tokens that a row appends in these tests, where ring and entry allow as many."""


def most_of(subject: Subject, unit: int, ring: int) -> int:
    """Most tokens that a row may append; skips engines that take one."""
    stated = subject.entry.capabilities.queries
    if stated == 1:
        pytest.skip(f"{subject.entry.name} appends one token a row")
    return min(stated or MOST, MOST, (ring - 1) * unit + 1)


class SeveralTests(KitTests):
    """Drafts that are verified: Q tokens of a row at once, some of which are taken back."""

    kind = "transfer"

    def test_several_tokens_are_where_one_by_one_puts_them(self, subject: Subject) -> None:
        """Ring, LRU slots and host hold every token, whatever units a step fills or leaves open,
        and whatever was rejected before it."""

        @examples(subject.tier, cpu=40, interpret=6, gpu=20)
        @given(st.data(), shapes(subject.tier.name), st.booleans())
        def check(data: st.DataObject, shape: dict[str, Any], resident: bool) -> None:
            unit, ring = shape["unit"], shape["ring"]
            most = most_of(subject, unit, ring)
            cache = cache_of(subject, max_queries=most, **shape | {"requests": 3})
            for slot in range(2):
                cache.begin(slot, resident)
                cache.prefill(slot, data.draw(st.integers(0, 4 * unit + 1)))
            width, lanes = cache.group.select, cache.group.lane_heads
            for _ in range(data.draw(st.integers(1, 4))):
                rows = data.draw(st.permutations([0, -1, 1]))
                counts = data.draw(st.lists(st.integers(0, most), min_size=3, max_size=3))
                ids = st.lists(st.integers(-1, 9), min_size=width, max_size=width)
                chosen = data.draw(st.lists(ids, min_size=3 * lanes, max_size=3 * lanes))
                cache.decode(rows, [chosen] * 2, counts, most)
                cache.check()
                for slot, count in zip(rows, counts, strict=True):
                    left = cache.requests[slot].length if slot >= 0 else 0
                    rejected = data.draw(st.integers(0, max(count - 1, 0)))
                    if slot >= 0 and cache.can_roll_back(slot, left - rejected):
                        cache.rollback(slot, left - rejected)
            cache.check()

        check()

    def test_several_tokens_of_dense_layers(self, subject: Subject) -> None:
        """They go to their pages, over the boundary of one too, and padding goes nowhere."""
        most, unit = most_of(subject, 4, 2), 4
        shape: dict[str, Any] = {"unit": unit, "units": 16, "page_units": 1}
        shape |= {"lane_heads": 1, "heads_per_lane": 2}
        for residency, lengths in itertools.product(
            ("resident", "streamed"), ((6, 9, 16), (5, 8, 3))
        ):
            bench = bench_of(subject, max_queries=most, residency=residency, **shape)
            group, store, slots = bench.group, bench.store, (1, -1, 0)
            counts = (most, most, min(2, most))
            k = torch.randn(3, most, group.num_kv_heads, group.head_dim).to(bench.device)
            expected = store.entries.clone()
            for row, (slot, length, count) in enumerate(zip(slots, lengths, counts, strict=True)):
                for nth in range(count if slot >= 0 else 0):
                    at, offset = divmod(length - count + nth, unit)
                    page, within = divmod(bench.host_id(slot, at), group.units_per_page)
                    for plane, sign in enumerate((1, -1)):
                        rows = (sign * k[row, nth]).to(expected.device)
                        expected[page, 1, 0, within, :, plane, offset] = rows
            states = zip(slots, lengths, counts, strict=True)
            bench.put([Row(s, n, n, count) if s >= 0 else Row() for s, n, count in states])
            bench.engine.append(bench.views[1], k, -k)
            bench.finish()
            assert torch.equal(raw(store.entries), raw(expected)), f"pages of {lengths}"
