"""Places of optional libraries: the first that serves is used; others say what they lack."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topkv.errors import CapabilityError
from topkv_authoring.libraries import Places, UnusableError, module_with

# For each place: reasons why it cannot be loaded, and why its library does not serve.
REASONS = st.lists(st.sampled_from(["old", "broken", "other device"]), max_size=2)
SEVERAL = st.lists(st.tuples(REASONS, REASONS), max_size=5)


def places_of(states):
    """Make the places, and a list that grows by the name of each that is loaded."""
    loaded = []

    def load(number, lacking, refused):
        loaded.append(f"place {number}")
        if lacking:
            raise UnusableError(*lacking)
        return SimpleNamespace(name=f"library {number}", refused=refused)

    loads = {
        f"place {number}": lambda number=number, state=state: load(number, *state)
        for number, state in enumerate(states)
    }
    return Places("install it", loads), loaded


@given(SEVERAL)
def test_the_first_that_serves_is_used_and_no_place_behind_it_is_loaded(states):
    places, loaded = places_of(states)
    library, tried = places.first(lambda library: library.refused)
    good = [number for number, state in enumerate(states) if not any(state)]
    behind = good[0] if good else len(states)
    assert (library and library.name) == (f"library {behind}" if good else None)
    assert loaded == [f"place {number}" for number in range(min(behind + 1, len(states)))]
    assert tried == [
        f"place {number}: {reason}"
        for number, (lacking, refused) in enumerate(states[:behind])
        for reason in lacking or refused
    ]


@given(SEVERAL, REASONS)
def test_an_error_has_every_reason(states, reasons):
    places, _ = places_of(states)
    library, tried = places.first(lambda library: library.refused)
    if library and not reasons:
        assert places.require("x", reasons, lambda library: library.refused).name == library.name
        return
    with pytest.raises(CapabilityError, match="x:") as caught:
        places.require("x", reasons, lambda library: library.refused)
    lack = [] if library else ["install it; tried were", *(f"  {each}" for each in tried)]
    assert list(caught.value.reasons) == [*reasons, *lack]


def test_each_place_has_a_line():
    places, _ = places_of([(["old", "broken"], []), ([], ["other device"])])
    assert places.describe() == ["place 0: old; broken", "place 1: ok, library 1"]


class Wrapper:
    def run(self, q, out):
        raise NotImplementedError


@pytest.fixture
def module(monkeypatch):
    made = ModuleType("topkv_library")
    made.Wrapper = Wrapper
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def test_a_module_is_known_by_what_its_functions_take(module):
    assert module_with("topkv_library", {"Wrapper.run": ("q", "out")}) is module
    with pytest.raises(UnusableError) as caught:
        module_with("topkv_library", {"Wrapper.run": ("lse", "q", "scale"), "Wrapper.plan": ()})
    assert caught.value.args == ("Wrapper.run takes no 'lse', 'scale'", "it has no Wrapper.plan")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (None, "ModuleNotFoundError: not installed"),
        ("import topkv_no_such", "ModuleNotFoundError: it needs topkv_no_such"),
        ("raise ImportError('undefined symbol: x\\nmore')", "ImportError: undefined symbol: x"),
        ("raise OSError", "OSError: no reason given"),
    ],
)
def test_what_does_not_import_says_why(monkeypatch, tmp_path, source, said):
    monkeypatch.syspath_prepend(tmp_path)
    if source:
        (tmp_path / "topkv_breaks.py").write_text(source)
    with pytest.raises(UnusableError) as caught:
        module_with("topkv_breaks", {})
    assert caught.value.args == (said,)
