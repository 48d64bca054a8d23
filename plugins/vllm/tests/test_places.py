"""Places of vLLM that are overridden, patched or read are looked up before a worker is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugins.vllm.tests.conftest import DEVICE
from plugins.vllm.tests.test_refusals import configured
from topkv.errors import CapabilityError
from topkv_vllm import places
from topkv_vllm.places import Place, moved, table
from topkv_vllm.refusals import check

README = Path(__file__).parents[1] / "README.md"


def test_what_is_there_is_found():
    there = [
        Place("topkv_vllm.places", "Place", "is here", fields=("module", "path", "alone")),
        Place("topkv_vllm.places", "Place.__init__", "takes", ("module", "why", "fields")),
        Place("topkv_vllm.places", "moved", "is called", ("device",), alone=True),
        Place("collections", "OrderedDict.move_to_end", "is called", ("key", "last")),
        Place("fractions", "Fraction", "is made", fields=("_numerator", "limit_denominator")),
    ]
    assert moved("cpu", there) == []


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
    (reason,) = moved("cpu", [place])
    assert f"{place.path}, which is sought, {reported}" in reason
    assert reason.endswith("this version of vLLM has moved it")


def test_places_of_another_device_are_not_looked_up():
    gone = Place("topkv.nowhere", "Any", "is sought", device="cuda")
    assert moved("cpu", [gone]) == []
    assert len(moved("cuda", [gone])) == 1


def test_the_page_of_the_package_has_the_table():
    assert table() in README.read_text()


def test_all_are_where_they_were_in_the_version_that_runs(served):
    """Places of a GPU are too, but for the order of its rows, which wants drafts since 0.31."""
    assert moved("cpu") == []
    others = [place for place in places.PLACES if "sort_batch" not in place.name]
    assert moved("cuda", others) == []


def test_those_beside_layers_that_vllm_keeps_are_too(needs_vllm):
    assert moved(DEVICE, places.BESIDE) == []


def test_an_engine_is_refused_whose_vllm_has_moved_one(served, model, version, monkeypatch):
    config = configured(model)
    monkeypatch.setattr(places, "PLACES", (Place("vllm", "Moved", "is sought"),))
    with pytest.raises(CapabilityError, match="cannot serve this through topkv") as caught:
        check(config, version)
    assert "vllm.Moved, which is sought, is not there" in caught.value.reasons[0]
