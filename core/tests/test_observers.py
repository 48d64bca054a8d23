"""Observers: made where the configuration names them, called at forwards, never in their way."""

from __future__ import annotations

import warnings
from typing import ClassVar

import pytest
import torch
from attrs import evolve

from topkv import hookimpl
from topkv.config.stages import Named
from topkv.coordinator import SparseCoordinator
from topkv.decode.loads import Loads
from topkv.entries import NoParameters, PluginEntry
from topkv.errors import PluginError
from topkv.report import Occupancy
from topkv_testing.integrity import check_integrity
from topkv_testing.machines.lifecycle_model import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    SPARSE,
    doubles,
    make_coordinator,
)
from topkv_testing.tiers import tier

CPU = tier("cpu")


class Keeps:
    """Keeps the reports of forwards, and what it counted when each ended."""

    made: ClassVar[list[Keeps]] = []

    def __init__(self, setup):
        self.config = setup.config
        self.begun, self.ended, self.counts, self.reports = [], [], [], []
        self.made.append(self)

    @hookimpl
    def before_forward(self, report):
        self.begun.append((report.slots, report.prompt_tokens))

    @hookimpl
    def after_forward(self, report):
        self.ended.append((report.slots, report.prompt_tokens))
        self.counts.append(report.transfers())
        self.reports.append(report)


class Fails(Keeps):
    """Raises when a forward has ended."""

    @hookimpl
    def after_forward(self, report):
        super().after_forward(report)
        raise OSError("the disk is full")


class FailsAtOnce(Keeps):
    """Raises when a forward begins."""

    @hookimpl
    def before_forward(self, report):
        super().before_forward(report)
        raise KeyError("slots")


class Binds(Keeps):
    """Notes the layers that it is bound to, and how often each has loaded."""

    @hookimpl
    def bind_layers(self, layers):
        self.bound = [path.view.layer for path in layers]
        self.loaded = dict.fromkeys(self.bound, 0)
        for path in layers:
            path.loads = Noted(path.loads, self.loaded)
        return lambda: dict(self.loaded)


class Noted(Loads):
    """The loads of a layer, whose number is kept."""

    def __init__(self, loads, loaded):
        super().__init__(loads.path, loads.number)
        self._loads, self._loaded = loads, loaded

    def plan(self, selection):
        return self._loads.plan(selection)

    def load(self, plan):
        self._loads.load(plan)
        self._loaded[self.path.view.layer] += 1


class BindsWithoutCounter(Keeps):
    """Binds to layers and counts nothing."""

    @hookimpl
    def bind_layers(self, layers):
        self.bound = [path.view.layer for path in layers]


class FailsToBind(Keeps):
    """Raises when it is bound to layers."""

    @hookimpl
    def bind_layers(self, layers):
        raise OSError("no clock")


OFFERED = {
    "keeps": Keeps,
    "fails": Fails,
    "fails-at-once": FailsAtOnce,
    "binds": Binds,
    "binds-without-counter": BindsWithoutCounter,
    "fails-to-bind": FailsToBind,
}


@pytest.fixture(autouse=True)
def made():
    """List of every observer that has been made, in order."""
    Keeps.made.clear()
    yield Keeps.made
    Keeps.made.clear()


def make(*names):
    """Make a coordinator whose configuration names these observers."""
    registry = doubles(
        *(
            PluginEntry(name, "observer", f"{__name__}:{cls.__name__}")
            for name, cls in OFFERED.items()
        )
    )
    plain = make_coordinator(CPU, registry=registry)
    plain.close()
    observers = tuple(Named(name, NoParameters()) for name in names)
    return SparseCoordinator(evolve(plain.config, observers=observers), registry)


def forward(coordinator, decode=(), prefill=(), select=()):
    """Run one forward of random keys, in which every lane selects the same units."""
    rows = len(decode) + sum(tokens for _, tokens in prefill)
    generator = torch.Generator().manual_seed(rows)

    def tokens(heads):
        return torch.randn(rows, heads, DIM, generator=generator)

    coordinator.forward_begin(decode=list(decode), prefill=list(prefill))
    for layer in range(LAYERS):
        if layer in SPARSE:
            path = coordinator.layers[layer]
            ids = torch.full_like(path.lanes.selection.ids, -1)
            ids[:, : len(select)] = torch.tensor(select, dtype=torch.int32)
            path.algorithm.next_ids[layer] = ids
        coordinator.attention(layer, tokens(HEADS), tokens(KV_HEADS), tokens(KV_HEADS))
        if layer in SPARSE:
            path.algorithm.next_ids.clear()  # Beginning the next forward may select as well.
    coordinator.forward_end()


def warned(failing):
    """The messages of the RuntimeWarnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        failing()
    return [str(each.message) for each in caught if each.category is RuntimeWarning]


def test_nothing_is_made_unless_the_configuration_names_it(made):
    coordinator = make()
    slot = coordinator.request_begin()
    forward(coordinator, prefill=[(slot, 5)])
    coordinator.close()
    assert made == []
    coordinator = make("keeps")
    assert [type(each).__name__ for each in made] == ["Keeps"]
    assert made[0].config is coordinator.config
    coordinator.close()


def test_an_observer_that_is_not_installed_is_refused():
    with pytest.raises(PluginError, match="unknown observer 'keep'") as caught:
        make("keep")
    assert "did you mean 'keeps'" in str(caught.value)


def test_a_report_says_what_a_forward_works_on(made):
    coordinator = make("keeps")
    one, two = coordinator.request_begin(), coordinator.request_begin()
    forward(coordinator, prefill=[(one, 5)])
    forward(coordinator, decode=[-1, one], prefill=[(two, 3)])
    coordinator.forward_begin(decode=[one])
    coordinator.forward_abort()
    (keeps,) = made
    expected = [((), 5), ((-1, one), 3), ((one,), 0)]
    assert keeps.begun == expected
    assert keeps.ended == expected[:2]
    coordinator.close()


def test_a_report_counts_transfers_of_its_decode_rows(made):
    coordinator = make("keeps")
    one, two = coordinator.request_begin(), coordinator.request_begin()
    forward(coordinator, prefill=[(one, 22)])
    forward(coordinator, prefill=[(two, 22)])
    (keeps,) = made
    # No row decodes in a forward of a prompt alone.
    assert (keeps.counts[-1].hits, keeps.counts[-1].misses) == (0, 0)
    lanes = len(SPARSE) * KV_HEADS
    forward(coordinator, decode=[-1, one], select=[0, 3])
    first = keeps.counts[-1]
    assert first.hits + first.misses == 2 * lanes
    forward(coordinator, decode=[one, -1], select=[0, 3, 5])
    second = keeps.counts[-1]
    assert second.hits + second.misses == 5 * lanes
    assert second.hits >= first.hits + 2 * lanes, "units that were just loaded are hits"
    entry = coordinator.layers[SPARSE[0]].view.group.entry_bytes
    assert second.loaded_bytes == second.misses * entry
    assert second == coordinator.transfers_of([one])
    # Counts of another request are its own.
    forward(coordinator, decode=[two], select=[1])
    assert keeps.counts[-1].hits + keeps.counts[-1].misses == lanes
    coordinator.close()


def sums(report):
    """Hits, misses and bytes."""
    return report.hits, report.misses, report.loaded_bytes


def test_counts_of_layers_add_up(made):
    coordinator = make("keeps")
    one = coordinator.request_begin()
    forward(coordinator, prefill=[(one, 22)])
    for _ in range(2):
        forward(coordinator, decode=[one], select=[0, 3])
    (keeps,) = made
    counts = keeps.counts[-1]
    assert list(counts.layers) == sorted(SPARSE)
    assert all(layer.misses and layer.hits for layer in counts.layers.values())
    assert all(not layer.layers for layer in counts.layers.values())
    parts = zip(*(sums(layer) for layer in counts.layers.values()), strict=True)
    assert tuple(map(sum, parts)) == sums(counts)
    coordinator.close()


def test_what_a_request_has_counted_outlives_dropped_and_cut_tokens():
    coordinator = make()
    one = coordinator.request_begin()
    forward(coordinator, prefill=[(one, 22)])
    forward(coordinator, decode=[one], select=[0, 3])
    counts = coordinator.transfers_of([one])
    assert counts.misses > 0
    coordinator.forward_begin(decode=[one])
    coordinator.forward_abort()
    assert coordinator.transfers_of([one]) == counts
    coordinator.truncate(one, 20)
    assert coordinator.transfers_of([one]) == counts
    twin = coordinator.fork(one)
    assert coordinator.transfers_of([one]) == counts
    assert sums(coordinator.transfers_of([twin])) == (0, 0, 0)
    coordinator.request_end(one)
    assert coordinator.request_begin() == one
    assert sums(coordinator.transfers_of([one])) == (0, 0, 0)
    coordinator.close()


def test_totals_keep_what_ended_requests_have_counted(made):
    coordinator = make("keeps")
    one, two = coordinator.request_begin(), coordinator.request_begin()
    forward(coordinator, prefill=[(one, 22), (two, 22)])
    forward(coordinator, decode=[one], select=[0, 3])
    (keeps,) = made
    first = keeps.counts[-1]
    coordinator.request_end(one)
    forward(coordinator, decode=[two], select=[0, 1])
    second, totals = keeps.counts[-1], keeps.reports[-1].totals()
    added = tuple(a + b for a, b in zip(sums(first), sums(second), strict=True))
    assert sums(totals) == added
    assert totals == coordinator.transfers_of()
    assert totals.layers[SPARSE[0]].hits == sum(
        counts.layers[SPARSE[0]].hits for counts in (first, second)
    )
    coordinator.close()


def test_occupancy_is_that_of_when_it_is_asked_for(made):
    coordinator = make("keeps")
    one = coordinator.request_begin()
    forward(coordinator, prefill=[(one, 5)])
    (keeps,) = made
    report, config = keeps.reports[-1], coordinator.config
    needed = -(-5 // config.page_tokens)
    pages, slots = config.num_pages - 1, config.max_requests
    assert report.occupancy() == Occupancy(pages, needed, slots, 1)
    coordinator.request_end(one)
    assert report.occupancy() == Occupancy(pages, 0, slots, 0)
    coordinator.close()


def test_counters_that_a_package_adds_are_asked_when_somebody_asks(made):
    coordinator, asked = make("keeps"), []
    (keeps,) = made
    forward(coordinator, prefill=[(coordinator.request_begin(), 5)])
    coordinator.observers.counts["mine"] = lambda: asked.append(1) or len(asked)
    (report,) = keeps.reports
    assert not asked
    assert [report.counts["mine"]() for _ in range(2)] == [1, 2]
    coordinator.close()


def test_one_that_binds_to_sparse_layers_loads_with_them_and_may_count(made):
    coordinator = make("keeps", "binds", "binds-without-counter")
    keeps, binds, without = made
    assert binds.bound == without.bound == sorted(SPARSE)
    slot = coordinator.request_begin()
    forward(coordinator, prefill=[(slot, 22)])
    (report,) = keeps.reports
    assert report.counts.keys() == {"binds"}
    assert report.counts["binds"]() == dict.fromkeys(SPARSE, 0)
    forward(coordinator, decode=[slot], select=[0, 3])  # warmed, then decoded
    assert report.counts["binds"]() == binds.loaded == dict.fromkeys(SPARSE, 2)
    coordinator.close()


def test_one_that_cannot_bind_is_left_out_before_the_first_forward(made):
    coordinators = []
    reported = warned(lambda: coordinators.append(make("fails-to-bind", "keeps")))
    assert reported == [
        "topkv-doubles 1 (observer 'fails-to-bind') failed in bind_layers and is left out from "
        "now on: OSError: no clock"
    ]
    (coordinator,) = coordinators
    failing, keeps = made
    forward(coordinator, prefill=[(coordinator.request_begin(), 5)])
    assert (len(failing.begun), len(keeps.begun)) == (0, 1)
    assert not coordinator.observers.counts
    coordinator.close()


@pytest.mark.parametrize(
    ("name", "hook", "error"),
    [
        ("fails", "after_forward", "OSError: the disk is full"),
        ("fails-at-once", "before_forward", "KeyError: 'slots'"),
    ],
)
def test_one_that_raises_is_left_out_and_the_forward_goes_on(made, name, hook, error):
    coordinator = make(name, "keeps")
    failing, keeps = made
    slot = coordinator.request_begin()
    reported = warned(lambda: forward(coordinator, prefill=[(slot, 5)]))
    assert reported == [
        f"topkv-doubles 1 (observer '{name}') failed in {hook} and is left out from now on: "
        f"{error}"
    ]
    assert coordinator.length(slot) == 5
    assert warned(lambda: forward(coordinator, decode=[slot])) == []
    assert coordinator.length(slot) == 6
    assert (len(failing.begun), len(failing.ended)) == (1, int(name == "fails"))
    assert (len(keeps.begun), len(keeps.ended)) == (2, 2)
    check_integrity(coordinator)
    coordinator.close()
