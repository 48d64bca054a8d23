"""Nothing wrong is reused of prompts, storages and sessions while a model changes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_lives import KINDS, Counts, live, lives_of

from topkv_transformers import watch
from topkv_transformers.prefixes import PromptPrefixes
from topkv_transformers.walk import Walk


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_found_is_of_the_model_as_it_is(tiny, kind):
    if kind == "adapters of PEFT":
        pytest.importorskip("peft")
    counts = Counts()

    @settings(max_examples=15)
    @given(lives_of(kind), st.booleans(), st.sampled_from(["all", "prompt"]))
    def check(actions, storage, policy):
        live(tiny, actions, storage, policy, counts, kind)

    check()
    assert counts.found >= counts.lives / 4, counts
    assert counts.asked >= counts.lives


@pytest.mark.slow
def test_another_process_finds_what_is_of_its_own_model(tiny):
    counts, kind = Counts(), "values of every kind"
    there = [("elsewhere", (3, 0), None, further) for further in (None, ("buffer", 2))]
    first = [("ask", "fresh", (3, 0), None), ("again",)]
    live(tiny, [*first, *there], True, "all", counts, kind)
    assert counts.elsewhere == [2, 1]


def history(*changes):
    """A prompt before changes and behind them, over either kind of pool."""
    asks = [("ask", "fresh", (3, 0), None), ("again",), ("ask", "fresh", (3, 0), None)]
    return [*asks[:1], *changes, *asks[1:]]


def forgets(monkeypatch, name, value=None):
    """Leave one input out of what is read of a model."""
    read = getattr(Walk, name)

    def left_out(self, *given):
        if value is not None:
            return None if value(*given) else read(self, *given)
        return None

    monkeypatch.setattr(Walk, name, left_out)


def _is_named(name):
    return lambda *given: given[0] == name


MUTANTS = {
    "lists": (("_inside", _is_named("_active")), ("change", "list", 1)),
    "mappings": (("_inside", _is_named("scaling")), ("change", "mapping", 2)),
    "objects": (("_inside", _is_named("scale")), ("change", "object", 2)),
    "partials": (("_inside", _is_named("then")), ("change", "partial", 2)),
    "plain tensors": (("_inside", _is_named("plain")), ("change", "plain tensor", 2)),
}


@pytest.mark.parametrize("input_", MUTANTS)
def test_an_input_that_is_left_out_is_noticed(tiny, monkeypatch, input_):
    left_out, changed = MUTANTS[input_]
    for storage in (False, True):
        actions = history(changed)
        live(tiny, actions, storage, "all", Counts())
        if not storage:  # the host pool ends with the handle
            actions = [each for each in actions if each != ("again",)]
        with monkeypatch.context() as patch:
            forgets(patch, *left_out)
            with pytest.raises(AssertionError):
                live(tiny, actions, storage, "all", Counts())


@pytest.mark.parametrize("mutant", ["writes", "contents", "ids", "the look"])
def test_a_rule_that_is_left_out_is_noticed(tiny, monkeypatch, mutant):
    fresh = ("ask", "fresh", (3, 0), None)
    turns = [("ask", how, (3, 1), None) for how in ("kept", "other history", *2 * ["rendered"])]
    other = ("ask", "chunks", (0, 3), None), ("ask", "fresh", (0, 3), None)
    cases = {
        "writes": [fresh, ("change", "buffer", 2), fresh],
        "contents": history(("change", "rows", 0)),
        "ids": turns,
        "the look": [fresh, ("change", "flag", 1), other[0], ("change", "flag", 0), other[1]],
    }
    live(tiny, cases[mutant], mutant == "contents", "all", Counts())
    if mutant == "writes":
        tensor = Walk._tensor

        def without_version(self, given):
            tensor(self, given)
            self.places[-1] = (*self.places[-1][:-1], 0)

        monkeypatch.setattr(Walk, "_tensor", without_version)
    elif mutant == "contents":
        monkeypatch.setattr(watch, "contents_of", sums)
    elif mutant == "ids":
        monkeypatch.setattr(PromptPrefixes, "_remember", believe)
    else:
        monkeypatch.setattr(watch.ModelWatch, "look", lambda self: self.state or _first(self))
    with pytest.raises(AssertionError):
        live(tiny, cases[mutant], mutant == "contents", "all", Counts())


def sums(tensors):
    """Contents that do not know places."""
    return [float(each.detach().double().sum()) for each in tensors]


def believe(self, call, state, output, before):
    """Take a cache to hold what the last call passed."""
    state.known = output.sequences[:, : state.seen].cpu().numpy()


def _first(self):
    self.state = watch.ModelState(Walk(self.decoder), [])
    return self.state
