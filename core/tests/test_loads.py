"""Loads of layers that share a selection are ahead of their layer, and change no bit."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.tests.history_driver import Driver, prompts
from topkv.decode.loads import Loads
from topkv_testing.machines.delays import delayed_copies, loaded_in_time
from topkv_testing.machines.lifecycle_model import SPARSE, make_coordinator
from topkv_testing.tiers import tier

FIRST, SECOND = SPARSE

TIERS = [
    pytest.param("cpu"),
    pytest.param("gpu", marks=pytest.mark.gpu),
]


def sharing(on, **options):
    """A coordinator whose second sparse layer attends to what the first one selects."""
    return make_coordinator(on, share="FS", **options)


def lives(driver):
    """Run prompts and forks, then steps in which units come and go."""
    prompts(driver)
    one, two, *_ = driver.slots
    for step in range(12):
        driver.forward([two, one])
        if step == 8:
            driver.call("truncate", two, 14)


def compared(on, broken=contextlib.nullcontext, late=contextlib.nullcontext, **options):
    """Compare outputs and counts of loads ahead with those of loads in time."""
    found = []
    for in_time in (True, False):
        coordinator = sharing(on, **options)
        driver = Driver(loaded_in_time(coordinator) if in_time else coordinator)
        try:
            with contextlib.ExitStack() as stack:
                if not in_time:
                    stack.enter_context(broken())
                    stack.enter_context(late())
                lives(driver)
            report = coordinator.transfers_of()
        finally:
            coordinator.forward_abort()
            driver.close()
        found.append((driver.outputs[0], report.hits, report.misses))
    (true, *counts), (ahead, *counted) = found
    assert all(map(torch.equal, true, ahead)), "outputs differ"
    assert counted == counts
    assert counts[1] > 0, "nothing was missed"


@pytest.mark.parametrize("name", TIERS)
@pytest.mark.parametrize("options", [{}, {"buffer": 24}])
def test_outputs_are_those_of_loads_in_time(name, options):
    on = tier(name)
    if on.missing:
        pytest.skip(on.missing)
    compared(on, **options)


def called(coordinator):
    """Record calls of the transfer engine in order: name and layer."""
    calls, engine = [], coordinator.layers[FIRST].transfer

    def reported(name, call):
        def noting(view, *arguments):
            calls.append((name, view.layer))
            return call(view, *arguments)

        return noting

    for name in ("append", "plan", "load"):
        setattr(engine, name, reported(name, getattr(engine, name)))
    return calls


def test_they_begin_when_the_selection_is_known():
    coordinator = sharing(tier("cpu"))
    driver = Driver(coordinator)
    driver.begin()
    driver.forward(chunks=[(driver.slots[0], 21)])
    driver.forward(driver.slots)
    calls = called(coordinator)
    driver.forward(driver.slots)
    ahead = [("plan", FIRST), ("load", FIRST), ("plan", SECOND), ("load", SECOND)]
    assert calls == [("append", FIRST), *ahead, ("append", SECOND)]
    calls.clear()
    loaded_in_time(coordinator)
    driver.forward(driver.slots)
    assert calls == [("append", FIRST), *ahead[:2], ("append", SECOND), *ahead[2:]]
    driver.close()


def test_prompts_are_warmed_by_them():
    coordinator = sharing(tier("cpu"))
    driver = Driver(coordinator)
    driver.begin()
    driver.forward(chunks=[(driver.slots[0], 21)])
    calls = called(coordinator)
    coordinator.settle(driver.slots)
    assert [layer for name, layer in calls if name == "load"] == [FIRST, SECOND]
    driver.close()


@pytest.mark.parametrize("share", ["F", "FS", "FSFSS", "FSSS"])
def test_as_many_have_plans_of_their_own_as_are_on_their_way(share):
    coordinator = make_coordinator(tier("cpu"), layers={"0-": "scripted"}, share=share)
    slot = coordinator.request_begin()
    coordinator.forward_begin(prefill=[(slot, 0)], decode=[-1])
    numbers = [path.loads.number for path in coordinator.layers]
    expected: list[int] = []
    for side in [*share * 4][: len(numbers)]:
        expected.append(0 if side == "F" else expected[-1] + 1)
    assert numbers == expected
    own = {path.lanes.plans[path.loads.number].slots.data_ptr() for path in coordinator.layers}
    assert len(own) == len(coordinator.lanes[0].plans) == max(expected) + 1
    coordinator.forward_abort()
    coordinator.close()


def test_an_interrupt_leaves_nothing_on_its_way():
    """Copies of a dropped forward have ended when its requests are cut or given back."""

    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.integers(0, 4), min_size=3, max_size=8), st.integers(0, 2**16))
    def check(stops, seed):
        drivers = []
        for in_time in (True, False):
            coordinator = sharing(tier("cpu"))
            driver = Driver(loaded_in_time(coordinator) if in_time else coordinator)
            driver.random.manual_seed(seed)
            driver.begin()
            driver.forward(chunks=[(driver.slots[0], 23)])
            for stop in stops:
                driver.forward(driver.slots, layers=range(stop), drop=stop < 4)
            drivers.append(driver)
        one, two = drivers
        assert all(map(torch.equal, one.outputs[0], two.outputs[0]))
        for driver in drivers:
            driver.close()

    check()


@pytest.mark.gpu
def test_copies_may_be_late():
    compared(tier("gpu"))  # compiles
    with delayed_copies(0.01) as delays:
        compared(tier("gpu"))
    assert delays.count


@contextlib.contextmanager
def without_waiting():
    """Let a layer attend before its loads have ended."""
    load = Loads.load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loads, "load", lambda self, plan: None if self.number else load(self, plan))
        yield


@pytest.mark.gpu
def test_a_missing_wait_shows():
    compared(tier("gpu"))
    with pytest.raises(AssertionError):
        compared(tier("gpu"), broken=without_waiting, late=lambda: delayed_copies(0.02))
