"""Places of an engine that are no longer what a package takes them for."""

from __future__ import annotations

import pytest

from topkv_engines.places import Place, moved, table


def test_what_is_there_is_found():
    there = [
        Place("topkv_engines.places", "Place", "is here", fields=("module", "path", "alone")),
        Place("topkv_engines.places", "Place.__init__", "takes", ("module", "why", "fields")),
        Place("topkv_engines.places", "table", "is called", ("places",), alone=True),
        Place("collections", "OrderedDict.move_to_end", "is called", ("key", "last")),
        Place("fractions", "Fraction", "is made", fields=("_numerator", "limit_denominator")),
    ]
    assert moved(there, "cpu", "Engine") == []


@pytest.mark.parametrize(
    ("place", "reported"),
    [
        (Place("topkv.nowhere", "Any", "is sought"), "is not there"),
        (Place("topkv.errors", "NoSuchError", "is sought"), "is not there"),
        (Place("topkv.errors", "TopkvError", "is sought", fields=("gone",)), "has no gone"),
        (Place("json", "dumps", "is sought", ("obj", "gone")), "takes no gone"),
        (Place("json", "dumps", "is sought", ("skipkeys",), alone=True), "wants obj too"),
    ],
)
def test_what_has_moved_is_named(place, reported):
    (reason,) = moved([place], "cpu", "Engine")
    assert f"{place.path}, which is sought, {reported}" in reason
    assert reason.endswith("this version of Engine has moved it")


def test_places_of_another_device_are_not_looked_up():
    gone = Place("topkv.nowhere", "Any", "is sought", device="cuda")
    assert moved([gone], "cpu", "Engine") == []
    assert len(moved([gone], "cuda", "Engine")) == 1


def test_the_table_has_a_row_for_each():
    rows = table([Place("json", "dumps", "writes", ("obj",)), Place("fractions", "", "is there")])
    assert rows.splitlines()[2:] == [
        "| `json.dumps` | writes | `obj` |",
        "| `fractions.` | is there |  |",
    ]
