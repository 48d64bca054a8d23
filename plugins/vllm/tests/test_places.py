"""Places of vLLM that are overridden, patched or read are looked up before a worker is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugins.vllm.tests.conftest import DEVICE
from plugins.vllm.tests.test_refusals import configured
from topkv.errors import CapabilityError
from topkv_engines.places import Place, moved, table
from topkv_vllm import places
from topkv_vllm.refusals import check

README = Path(__file__).parents[1] / "README.md"


def test_the_page_of_the_package_has_the_table():
    assert table((*places.PLACES, *places.BESIDE)) in README.read_text()


def test_all_are_where_they_were_in_the_version_that_runs(served):
    """Places of a GPU are too, but for the order of its rows, which wants drafts since 0.31."""
    assert moved(places.PLACES, "cpu", "vLLM") == []
    others = [place for place in places.PLACES if "sort_batch" not in place.name]
    assert moved(others, "cuda", "vLLM") == []


def test_those_beside_layers_that_vllm_keeps_are_too(needs_vllm):
    assert moved(places.BESIDE, DEVICE, "vLLM") == []


def test_an_engine_is_refused_whose_vllm_has_moved_one(served, model, version, monkeypatch):
    config = configured(model)
    monkeypatch.setattr(places, "PLACES", (Place("vllm", "Moved", "is sought"),))
    with pytest.raises(CapabilityError, match="cannot serve this through topkv") as caught:
        check(config, version)
    assert "vllm.Moved, which is sought, is not there" in caught.value.reasons[0]
