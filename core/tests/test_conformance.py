"""What the core itself offers, under the conformance kit; and the kit's own tools."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from topkv.hooks.registry import hookimpl
from topkv.testing import fuzz
from topkv.testing.algorithms import AlgorithmOptions, AlgorithmTests
from topkv.testing.evictions import EvictionTests
from topkv.testing.fuzz_lanes import FastLane
from topkv.testing.indexed import INDEXED
from topkv.testing.oracle import LaneModel
from topkv.testing.tiers import tier
from topkv.testing.transfers import TransferTests
from topkv.transfer.engine import ZeroCopyTransfer


class TestZeroCopy(TransferTests):
    @pytest.fixture
    def plugin(self):
        return "zero_copy"


class TestLeastRecentlyUsed(EvictionTests):
    @pytest.fixture
    def plugin(self):
        return "lru"


class TestIndexed(AlgorithmTests):
    @pytest.fixture
    def plugin(self):
        return evolve(INDEXED, capabilities=evolve(INDEXED.capabilities, tiers=("cpu",)))

    @pytest.fixture
    def options(self):
        return AlgorithmOptions(hidden_needles=True, head_needles=True)


@given(
    st.integers(1, 6),
    st.lists(
        st.tuples(st.lists(st.integers(-2, 12), max_size=6), st.integers(0, 12)), max_size=12
    ),
)
def test_the_fast_lane_is_the_ordered_model(capacity, steps):
    slow, fast = LaneModel(capacity), FastLane(capacity)
    low = 0
    for ids, limit in steps:
        ids, low = ids[:capacity], max(low, limit - 2)
        assert fast.select(ids, limit, low) == slow.select(ids, limit, low)
        assert (fast.order, fast.unit_in) == (slow.order, slow.unit_in)
        held = {unit: slot for slot, unit in enumerate(slow.unit_in) if unit is not None}
        assert fast.slot_of == held


@pytest.mark.parametrize("name", ["cpu", "interpret", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_fuzz_passes(name):
    where = tier(name)
    if where.missing:
        pytest.skip(where.missing)
    steps, requests, calls = {
        "cpu": (6000, 32, 16),
        "interpret": (100, 4, 2),
        "gpu": (50_000, 64, 64),
    }[name]
    done = fuzz.fuzz(ZeroCopyTransfer, steps, where.device, where.impl, 11, requests, calls)
    assert done >= steps


class KeepsAStaleMap(ZeroCopyTransfer):
    """Reset leaves one unit in the map."""

    @hookimpl
    def reset(self, slot):
        kept = self.store.unit_slot[:, self.store.rows_of(slot), 3].clone()
        super().reset(slot)
        self.store.unit_slot[:, self.store.rows_of(slot), 3] = kept


def test_fuzz_finds_a_stale_map_and_names_the_seed(monkeypatch, capsys, tmp_path):
    class Plugins:
        def create(self, kind, name, *args):
            return KeepsAStaleMap(*args)

    monkeypatch.setattr(fuzz, "registry", Plugins)
    log = tmp_path / "log"
    options = ["--impl", "reference", "--device", "cpu", "--requests", "8"]
    assert fuzz.main([*options, "--steps", "20000", "--seed", "4", "--log", str(log)]) == 1
    out = capsys.readouterr().out
    assert "1 violations" in out.splitlines()[-1]
    assert log.read_text() == out
    seed = out.split("reproduce with --seed ")[1].split()[0]
    assert fuzz.main([*options, "--steps", "1", "--seed", seed]) == 1
