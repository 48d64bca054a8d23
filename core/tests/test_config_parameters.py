"""Lowering of parameters: reasons say whose they are, and where they were written."""

from __future__ import annotations

from typing import Any

from config_cases import PagesParams, low, make, origin, reason, refused


def test_a_list_that_holds_itself_is_refused():
    endless: list[Any] = []
    endless.append(endless)
    assert "must be a list, each an int" in reason(params={"steps": endless})


def test_lower_names_whose_they_are_and_where_they_were_written():
    found = refused(
        params={"sinks": -1, "bits": True},
        layers={"5": {"params": {"share": "all"}}},
    )
    who = "of topkv-fake 0.3 (algorithm 'pages')"
    assert f"parameter sinks {who} must be >= 0, got -1 (user)" in found
    assert f"parameter bits {who} must be an int, got True (user)" in found
    (why,) = (why for why in found if "share" in why)
    assert why.startswith(f"parameter share {who} must be a number, got 'all'")
    assert "user, layers['5']" in why


def test_lower_judges_several_together():
    why = reason(params={"sinks": 9})
    assert "sinks must be at most bits, got 9 and 8 (user)" in why


def test_equal_parameters_are_one_group():
    lowered = low(layers={"4": {"params": {"share": 1}}, "5": {"params": {"share": 1.0}}})
    shapes = [group.shape.layers for group in lowered.groups if group.algorithm]
    assert (4, 5) in shapes
    assert origin(lowered, "layers[4-5].params.share") == (1.0, "user, layers['4']")


def test_observers_have_parameters_and_are_refused_by_name():
    found = make(observers=[("counts", {"parameters": PagesParams})])
    lowered = low(registry=found, observers=[{"name": "counts", "params": {"bits": 2}}])
    (asked,) = lowered.observers
    assert (asked.name, asked.params) == ("counts", PagesParams(bits=2))
    why = reason(registry=found, observers=[{"name": "counts", "params": {"bits": "many"}}])
    assert why.startswith("parameter bits of topkv-fake 0.3 (observer 'counts') must be an int")
