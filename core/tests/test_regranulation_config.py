"""Lowering where algorithm and backend have different units, and its messages to the user."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from topkv import hookimpl
from topkv.config import SparseConfig, lower
from topkv.entries import Capabilities, PluginEntry
from topkv.errors import ConfigError
from topkv.plugins import PluginRecord, PluginRegistry
from topkv.types import IndexerShape, ModelShape
from topkv_cli.matrix import matrix, rows_of

MODEL = ModelShape(4, 8, 2, 64, torch.bfloat16, 0.125)
SIZES = {"budget": 128, "buffer": 2048, "max_request_tokens": 1024, "dense_layers": []}


class Entries:
    """An algorithm and a backend of one package; nothing here imports their factories."""

    def __init__(self, algorithm, backend, defaults):
        self.algorithm = PluginEntry(
            "picks", "algorithm", "x:Y", capabilities=algorithm, defaults=defaults
        )
        self.backend = PluginEntry("reads", "backend", "x:Y", capabilities=backend)

    @hookimpl
    def topkv_register_algorithms(self):
        return [self.algorithm]

    @hookimpl
    def topkv_register_backends(self):
        return [self.backend]


def low(units=(1, 1), reads=(16, 64), model=MODEL, needs_index=False, default=1, **options):
    algorithm = Capabilities(units=units, needs_index=needs_index, attention=("gqa", "mla"))
    backend = Capabilities(units=reads, attention=("gqa", "mla"))
    entries = Entries(algorithm, backend, {} if default is None else {"unit": default})
    registry = PluginRegistry([("topkv-fake", "0.3", entries)])
    config = SparseConfig(**{**SIZES, **options})
    return lower(config, model, device=torch.device("cpu"), registry=registry)


def refused(**options):
    with pytest.raises(ConfigError) as caught:
        low(**options)
    return list(caught.value.reasons)


def group_of(**options):
    (group,) = low(**options).groups
    return group


def test_the_group_is_stored_by_the_unit_and_selected_by_tokens():
    group = group_of(unit=16, regranulate=True)
    stored, selected_as = group.shape, group.selected_as
    assert group.regranulated
    assert (stored.unit, stored.buffer_slots, stored.ring_slots) == (16, 128, 2)
    assert (selected_as.unit, selected_as.buffer_slots, selected_as.ring_slots) == (1, 2048, 32)
    assert (stored.max_units, selected_as.max_units) == (64, 1024)
    assert selected_as.select == 128 - 16  # the tail's unit belongs to the budget
    assert stored.select == 64  # 112 tokens, and a request has no more units
    same = {"unit": 1, "buffer_slots": 2048, "ring_slots": 32, "max_units": 1024, "select": 112}
    assert evolve(stored, **same) == selected_as
    few = group_of(unit=16, regranulate=True, budget=26)
    assert (few.selected_as.select, few.shape.select) == (10, 10)


def test_nothing_is_lost_to_a_short_request():
    group = group_of(unit=16, regranulate=True, budget=2048, max_request_tokens=128)
    assert (group.selected_as.select, group.shape.select) == (128, 8)


def test_the_backend_says_by_what_unit_where_nobody_does():
    lowered = low(regranulate=True)
    assert lowered.groups[0].shape.unit == 16
    assert lowered.groups[0].selected_as.unit == 1
    settings = {setting.name: (setting.value, setting.origin) for setting in lowered.settings}
    assert settings["unit"] == (16, "topkv-fake 0.3: its smallest")
    assert settings["regranulate"] == (True, "user")
    assert "16 of tokens" in lowered.describe()
    assert group_of(regranulate=True, unit=32).shape.unit == 32
    assert group_of(regranulate=True, reads=None).shape.unit == 1
    (only,) = refused(regranulate=True, unit=1)
    assert "(backend 'reads') takes units of 16 to 64 tokens, got 1: change unit (" in only


@pytest.mark.parametrize(
    ("units", "unit"), [((1, 1), 1), ((1, 64), 16), ((16, 16), 16), (None, 8)]
)
def test_it_changes_nothing_where_the_algorithm_takes_the_unit(units, unit):
    options = {"units": units, "unit": unit, "reads": None, "ring_tokens": 32}
    with_it, without = group_of(**options, regranulate=True), group_of(**options)
    assert with_it == without
    assert with_it.selected_as is with_it.shape
    assert not with_it.regranulated
    assert "regranulate" in {setting.name for setting in low(**options).settings}


def test_what_is_refused_says_that_it_would_help():
    (algorithm,) = refused(unit=16)
    assert "(algorithm 'picks') takes units of 1 to 1 tokens, got 16: change unit, or" in algorithm
    assert "or allow it: regranulate=True" in algorithm
    (backend,) = refused()
    assert "(backend 'reads') takes units of 16 to 64 tokens, got 1: change unit, or" in backend
    assert "or allow it: regranulate=True" in backend
    both = refused(unit=128, budget=256, ring_tokens=256, page_tokens=128)
    assert ["regranulate" in text for text in both] == [True, False]
    assert all("regranulate" not in text for text in refused(units=(1, 8), unit=16))


def test_an_indexer_selects_tokens_too():
    model = ModelShape(2, 8, 1, 64, torch.bfloat16, 0.1, "mla", 56, IndexerShape(4, 32))
    options = {"model": model, "needs_index": True, "scope": "shared"}
    assert group_of(**options, unit=16, regranulate=True).selected_as.unit == 1
    (only,) = refused(**options, unit=16)
    assert "takes units of 1 to 1 tokens, got 16: change unit, or allow it: regranulate" in only


@pytest.mark.parametrize("units", [(4, 4), (1, 8), (2, 8)])
def test_units_of_several_tokens_are_not_regranulated(units):
    """Their algorithms recompute the open unit from the ring, which is in other units."""
    (only,) = refused(units=units, unit=16, regranulate=True)
    assert f"takes units of {units[0]} to {units[1]} tokens, got 16: change unit; " in only
    assert "regranulate is for algorithms that select single tokens" in only


def test_the_buffer_holds_a_unit_for_each_token():
    reported = refused(unit=16, regranulate=True, budget=46, buffer=256)
    assert reported == [
        "buffer must hold the selection: 30 units of 16 tokens (regranulated, each of 30 tokens "
        "may lie in one of its own), got 256 tokens = 16 units; raise buffer to 480 or lower "
        "budget (layers 0-3)"
    ]
    assert group_of(unit=16, regranulate=True, budget=46, buffer=480).shape.buffer_slots == 30


def test_the_budget_holds_a_token_and_the_tail():
    (only,) = refused(unit=16, regranulate=True, budget=16)
    assert "at least a unit and a token (17 tokens: one selected and the tail), got 16" in only
    assert group_of(unit=16, regranulate=True, budget=17).selected_as.select == 1


def test_layers_allow_it_for_themselves():
    layers = {"2-": {"unit": 16, "regranulate": True}}
    tokens, pages = low(reads=None, ring_tokens=32, layers=layers).groups
    assert (tokens.shape.unit, tokens.regranulated) == (1, False)
    assert (pages.shape.unit, pages.regranulated) == (16, True)
    assert (tokens.shape.layers, pages.shape.layers) == ((0, 1), (2, 3))
    (only,) = refused(unit=16, regranulate=True, layers={"3": {"regranulate": False}})
    assert "or allow it: regranulate=True (layers 3, sparse)" in only
    assert "regranulate must be true or false, got 1" in refused(regranulate=1)


def test_ids_of_tokens_stay_below_the_limit():
    """Representations are kept by token, however large the units are."""
    sizes = {"max_tokens": 2**31 - 1, "max_request_tokens": 2**15, "unit": 64, "buffer": 2**15}
    (only,) = refused(**sizes, regranulate=True)
    assert "host units must be fewer than 2**31" in only
    assert low(**sizes, units=(64, 64))


def test_the_matrix_says_where_it_helps():
    def cells(**changes):
        entries = Entries(Capabilities(**changes), Capabilities(units=(16, 64)), {"unit": 1})
        records = PluginRegistry([("topkv-fake", "0.3", entries)]).records()
        assert all(isinstance(record, PluginRecord) for record in records)
        found = matrix(records)
        return {(c.attention, c.scope, c.unit): c for c in found}, rows_of(found)[1]

    found, rows = cells(units=(1, 1), tiers=("cpu", "gpu"))
    assert {found["gqa", "shared", unit].state for unit in (1, 16, 64)} == {"refused"}
    assert found["gqa", "shared", 1].regranulated is None
    assert found["gqa", "shared", 16].regranulated == ("cpu", "gpu")
    assert found["mla", "shared", 16].regranulated is None
    assert ["picks", "gqa", "shared", "1", "takes units of 16 to 64 tokens"] in rows
    assert ["picks", "gqa", "shared", "16", "regranulate: cpu gpu"] in rows
    found, rows = cells(units=(1, 1), tiers=())
    assert found["gqa", "shared", 16].regranulated == ()
    assert ["picks", "gqa", "shared", "16", "regranulate: untested"] in rows
    found, rows = cells(units=(1, 8))
    assert not any(cell.regranulated for cell in found.values())
    assert {row[3] for row in rows} == {"1"}


def test_a_plugin_cannot_allow_it():
    entries = Entries(Capabilities(units=(1, 1)), Capabilities(units=(16, 64)), {"unit": 1})
    entries.algorithm = evolve(entries.algorithm, defaults={"unit": 1, "regranulate": True})
    registry = PluginRegistry([("topkv-fake", "0.3", entries)])
    with pytest.raises(ConfigError, match="or allow it: regranulate=True"):
        lower(SparseConfig(**SIZES), MODEL, device=torch.device("cpu"), registry=registry)
