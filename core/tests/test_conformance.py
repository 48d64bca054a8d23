"""What the core itself offers, under the conformance kit; and the kit's own tools."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from topkv.entries import Capabilities, PluginEntry
from topkv.hooks.discovery import hookimpl
from topkv.ops.topk import topk
from topkv.plugins import registry
from topkv.testing import fuzz
from topkv.testing.algorithms import AlgorithmOptions, AlgorithmTests
from topkv.testing.evictions import EvictionTests
from topkv.testing.machines.fuzz_lanes import FastLane
from topkv.testing.models.indexed import INDEXED
from topkv.testing.models.storage_doubles import SHELF, SHELVES
from topkv.testing.observers import ObserverOptions, ObserverTests
from topkv.testing.oracle import LaneModel
from topkv.testing.storages import StorageOptions, StorageTests
from topkv.testing.tiers import tier
from topkv.testing.topks import TopKOptions, TopKTests
from topkv.testing.transfers import TransferTests
from topkv.transfer.reference import ReferenceTransfer


class TestZeroCopy(TransferTests):
    @pytest.fixture
    def plugin(self):
        return "zero_copy"


class TestLeastRecentlyUsed(EvictionTests):
    @pytest.fixture
    def plugin(self):
        return "lru"


class TestRadixTopK(TopKTests):
    @pytest.fixture
    def plugin(self):
        return "radix"

    @pytest.fixture
    def options(self):
        """At the edges of the blocks that hold a row in registers, and beyond."""
        return TopKOptions(widths=(2048, 2049, 16384, 16385, 70000), selects=(1, 1500, 9000))


class SortedTopK:
    """The formula that algorithms select by where they are references."""

    def __init__(self, setup):
        """Nothing depends on the setup."""

    @hookimpl
    def topk(self, scores, lengths, ids):
        topk(scores, lengths, ids, impl="reference")


class TestSortedTopK(TopKTests):
    @pytest.fixture
    def plugin(self):
        what = Capabilities(capture=False, tiers=("cpu", "gpu"))
        return PluginEntry("sorted", "topk", f"{__name__}:SortedTopK", capabilities=what)


class TestWatcher(ObserverTests):
    """The observer that the suite of engines plugs in."""

    @pytest.fixture
    def plugin(self):
        return PluginEntry("watcher", "observer", "topkv.testing.models.engine_doubles:Watcher")

    @pytest.fixture
    def options(self):
        return ObserverOptions(
            says=lambda watcher: (
                watcher.began,
                [(each.slots, each.prefill_tokens) for each in watcher.ended],
            ),
            oracle=lambda told: (
                [(each.slots, each.prompt_tokens) for each in told],
                [(each.slots, each.prompt_tokens) for each in told if each.ended],
            ),
        )


class TestShelf(StorageTests):
    """The storage that tests of the core go on, under a name of its own."""

    @pytest.fixture
    def plugin(self):
        return evolve(SHELF, name="bookcase")

    @pytest.fixture
    def options(self):
        numbers = itertools.count()
        return StorageOptions(lambda: {"shelf": f"kit {next(numbers)}"}, reopens=True)

    @pytest.fixture(autouse=True)
    def tidy(self):
        yield
        SHELVES.clear()


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
    make = partial(registry().create, "transfer", "zero_copy")
    done = fuzz.fuzz(make, steps, where.device, where.impl, 11, requests, calls)
    assert done >= steps


class KeepsAStaleMap(ReferenceTransfer):
    """Reset leaves one unit in the map."""

    @hookimpl
    def reset(self, slot):
        kept = self.store.unit_slot[:, self.store.lanes_of(slot), 3].clone()
        super().reset(slot)
        self.store.unit_slot[:, self.store.lanes_of(slot), 3] = kept


def test_fuzz_finds_a_stale_map_and_names_the_seed(monkeypatch, capsys, tmp_path):
    class Plugins:
        def create(self, kind, name, setup, impl):
            return KeepsAStaleMap(setup)

    monkeypatch.setattr(fuzz, "registry", Plugins)
    log = tmp_path / "log"
    options = ["--impl", "reference", "--device", "cpu", "--requests", "8"]
    assert fuzz.main([*options, "--steps", "20000", "--seed", "4", "--log", str(log)]) == 1
    out = capsys.readouterr().out
    assert "1 violations" in out.splitlines()[-1]
    assert log.read_text() == out
    seed = out.split("reproduce with --seed ")[1].split()[0]
    assert fuzz.main([*options, "--steps", "1", "--seed", seed]) == 1
