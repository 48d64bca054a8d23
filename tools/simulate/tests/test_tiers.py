"""Tiers of the simulator find what a coordinator finds, token for token."""

from __future__ import annotations

import tempfile

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("topkv_files")

from asked_histories import (
    HISTORIES,
    OBJECT,
    PAGES,
    Life,
    coordinator_of,
    in_order,
    sizes_of,
)

from tests.machines.kept import keeping
from topkv.errors import CapabilityError, RequestError
from topkv_prefixes.pages import PrefixPages
from topkv_prefixes.settings import WRITES
from topkv_simulate import tiers as simulated
from topkv_simulate.asked import Asked, Setup
from topkv_simulate.asking import asking
from topkv_simulate.tier_bound import most_found
from topkv_simulate.tiers import Stored, Tiers
from topkv_testing.machines.lifecycle_model import make_coordinator
from topkv_testing.tiers import tier

FEW = settings(phases=[Phase.explicit, Phase.generate])
"""Settings for few examples: a history takes half a second."""

TIERS = st.tuples(
    st.sampled_from(PAGES),
    st.sampled_from([None, 6, 20, 1000]),
    st.sampled_from(WRITES),
    st.sampled_from([1, 9]),
)
"""Host pages, stored pages, when they are written, and the setting ``least_tokens``."""


def lived(history, sizes, settle=None):
    """Run a history on a coordinator of these sizes; return what it found, did and asked for."""
    with tempfile.TemporaryDirectory() as path:
        coordinator = coordinator_of(path, *sizes)
        storage = coordinator.keeper.storage
        try:
            with asking(coordinator) as recorder:
                life = Life(coordinator, settle(storage) if settle else lambda: None)
                reported = life.live(history)
            counts = coordinator.keeper.counts
            done = [counts.asked, counts.found, counts.evicted]
            if storage:
                storage.wait()
                below = counts.storage
                done += [below.found, below.stored, below.dropped]
                assert (below.late, below.failed, below.damaged) == (0, 0, 0)
            return reported, done, recorder.trace()
        finally:
            coordinator.close()


def replayed(asked, sizes):
    """Replay a trace in the simulator; return what it found and did."""
    tiers = Tiers(asked, sizes_of(asked, *sizes))
    counts = tiers.run()
    found = [a + b for a, b in zip(counts.host, counts.stored, strict=True)]
    done = [sum(counts.asked), sum(found), counts.evicted]
    if sizes[1] is not None:
        done += [counts.fetched * asked.page_tokens, counts.written, counts.dropped]
    assert sum(found) <= most_found(asked, [sizes[0] - 1 + (sizes[1] or 0)])[0]
    return [*zip(counts.asked, found, strict=True)], done, counts


def same(history, recorded, other):
    """Check that the simulator does as the coordinator, in these sizes and in others."""
    reported, done, asked = lived(history, recorded)
    assert asked.object_bytes == OBJECT
    assert replayed(asked, recorded)[:2] == ([each[:2] for each in reported], done)
    reported, done, _ = lived(history, other)
    assert replayed(asked, other)[:2] == ([each[:2] for each in reported], done)
    return done


def check_histories(count):
    """Check N histories, and return what coordinators did in all of them."""
    seen = [0] * 6

    @settings(FEW, max_examples=count)
    @given(HISTORIES, TIERS, TIERS, st.sampled_from([2, 128]))
    def check(history, recorded, other, pages_a_call):
        with in_order(pages_a_call):
            for at, did in enumerate(same(history, recorded, other)):
                seen[at] += did

    check()
    return seen


def test_a_recorded_history_is_found_as_it_was():
    assert all(check_histories(10)), "nothing was found, evicted, fetched, stored or dropped"


@pytest.mark.slow
def test_many_recorded_histories_are_found_as_they_were():
    nightly = settings.get_current_profile_name() == "nightly"
    check_histories(600 if nightly else 40)


def fresh_first(self, keys):
    """Mark keys as used so that the first pages of a call go first."""
    for key in keys:
        self.held[key] = None
        self.held.move_to_end(key)


MUTANTS = {
    "a storage lets go of the first pages of a call first": (Stored, "_touch", fresh_first),
    "a full storage makes room for no more than what comes": (simulated, "LEFT", 1.0),
    "what is there is never stored again": (simulated, "_remember", lambda among, key: None),
    "pages that are held while others come may go": (PrefixPages, "share", lambda *given: None),
    "weights that have changed find what others stored": (Tiers, "_forget", lambda *given: None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_simulator_that_breaks_a_rule_is_noticed(name, monkeypatch):
    owner, rule, broken = MUTANTS[name]
    replay = Tiers.run

    def run(self):
        with monkeypatch.context() as patch:
            patch.setattr(owner, rule, broken)
            made = Tiers(self.asked, self.sizes)
            return replay(made)

    monkeypatch.setattr(Tiers, "run", run)
    with pytest.raises((AssertionError, RequestError)):
        check_histories(60)


def test_threads_find_the_same():
    """Nothing is in order here, but pages to be stored are stored before all goes on."""

    @settings(FEW, max_examples=4)
    @given(HISTORIES, st.sampled_from([6, 20, 1000]), st.sampled_from(WRITES[:2]))
    def check(history, objects, write):
        sizes = 24, objects, write
        reported, done, asked = lived(history, sizes, lambda storage: storage.wait)
        assert replayed(asked, sizes)[:2] == ([each[:2] for each in reported], done)

    check()


def test_where_tokens_come_from_is_kept_apart():
    """One prompt in a small host pool that others push out, and in a storage below."""
    first, others = ("run", (0, 1, 30), 0, b""), [("run", (0, n, 30), 0, b"") for n in (2, 3, 4)]
    history = [first, *others, first, first]
    with in_order(128):
        reported, _, asked = lived(history, (24, 1000))
    counts = replayed(asked, (24, 1000))[2]
    assert counts.asked == [30] * 6
    assert counts.stored == [0, 0, 0, 0, 28, 0]
    assert counts.host == [0, 0, 0, 0, 0, 28]
    assert [each[2] for each in reported] == [0, 0, 0, 0, 7, 7]
    assert replayed(asked, (24, None))[2].host == [0, 0, 0, 0, 0, 28]
    assert replayed(asked, (60, None))[2].host == [0, 0, 0, 0, 28, 28]


def test_a_recording_goes_through_a_file(tmp_path):
    history = [("run", (1, 1, 20), 3, b""), ("fork",), ("again", 7), ("run", (1, 2, 22), 0, b"")]
    with in_order(128):
        _, _, asked = lived(history, (24, 20))
    asked.save(tmp_path / "trace.jsonl")
    again = Asked.load(tmp_path / "trace.jsonl", Setup())
    assert replayed(again, (28, 6))[:2] == replayed(asked, (28, 6))[:2]
    text = (tmp_path / "trace.jsonl").read_text()
    assert len(text.splitlines()) == 1 + len(asked.events)


def test_recording_begins_where_nothing_is_kept_and_leaves_nothing_behind():
    with pytest.raises(CapabilityError, match="set pages to 'prefixes'"), asking(plain()):
        pass
    with pytest.raises(CapabilityError, match="all layers lie on the device"):
        asking(plain(pages="prefixes", layers={"0-3": "resident"})).__enter__()
    with pytest.raises(CapabilityError, match="quotas are not replayed"):
        asking(plain(pages=keeping(quotas={"*": "1GiB"}))).__enter__()
    coordinator = plain(pages="prefixes")
    before = {*vars(coordinator.keeper)}, {*vars(coordinator.requests.pages)}
    with pytest.raises(RequestError, match="holds no request"), asking(coordinator):
        cut_short(coordinator)
    assert ({*vars(coordinator.keeper)}, {*vars(coordinator.requests.pages)}) == before
    with pytest.raises(RequestError, match="0 requests and 5 kept pages"), asking(coordinator):
        pass
    coordinator.keeper.forget()
    slot = coordinator.request_begin()
    with pytest.raises(RequestError, match="1 requests and 0 kept"), asking(coordinator):
        pass
    coordinator.request_end(slot)


def cut_short(coordinator):
    Life(coordinator).live([("run", (0, 1, 20), 0, b"")])
    coordinator.request_end(0)


def plain(**options):
    return make_coordinator(tier("cpu"), **options)
