"""Lowering where a stage turns tokens into units, and its messages to the user."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from topkv import hookimpl
from topkv.config import SparseConfig, lower
from topkv.entries import Capabilities, PluginEntry
from topkv.errors import ConfigError
from topkv.plugins import PluginRegistry
from topkv.types import IndexerShape, ModelShape

BOTH = ("gqa", "mla")
TURNS = ["turns"]
ADVICE = "or add a stage that turns tokens into units"
MODEL = ModelShape(4, 8, 2, 64, torch.bfloat16, 0.125)
SIZES = {"budget": 128, "buffer": 2048, "max_request_tokens": 1024, "dense_layers": []}


class Entries:
    """An algorithm, a backend and two stages of one package; nothing here imports factories."""

    stages = (
        PluginEntry(
            "turns", "stage", "x:Y", capabilities=Capabilities(attention=BOTH, regrains=True)
        ),
        PluginEntry("drops", "stage", "x:Y"),
    )

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

    @hookimpl
    def topkv_register_stages(self):
        return list(self.stages)


def low(units=(1, 1), reads=(16, 64), model=MODEL, needs_index=False, default=1, **options):
    algorithm = Capabilities(units=units, needs_index=needs_index, attention=BOTH)
    backend = Capabilities(units=reads, attention=BOTH)
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
    group = group_of(unit=16, stages=TURNS)
    stored, selected_as = group.shape, group.selected_as
    assert group.regrained
    assert (stored.unit, stored.buffer_slots, stored.ring_slots) == (16, 128, 2)
    assert (selected_as.unit, selected_as.buffer_slots, selected_as.ring_slots) == (1, 2048, 32)
    assert (stored.max_units, selected_as.max_units) == (64, 1024)
    assert selected_as.select == 128 - 16  # the tail's unit belongs to the budget
    assert stored.select == 64  # 112 tokens, and a request has no more units
    same = {"unit": 1, "buffer_slots": 2048, "ring_slots": 32, "max_units": 1024, "select": 112}
    assert evolve(stored, **same) == selected_as
    few = group_of(unit=16, stages=TURNS, budget=26)
    assert (few.selected_as.select, few.shape.select) == (10, 10)


def test_nothing_is_lost_to_a_short_request():
    group = group_of(unit=16, stages=TURNS, budget=2048, max_request_tokens=128)
    assert (group.selected_as.select, group.shape.select) == (128, 8)


def test_the_backend_says_by_what_unit_where_nobody_does():
    lowered = low(stages=TURNS)
    assert lowered.groups[0].shape.unit == 16
    assert lowered.groups[0].selected_as.unit == 1
    settings = {setting.name: (setting.value, setting.origin) for setting in lowered.settings}
    assert settings["unit"] == (16, "topkv-fake 0.3: its smallest")
    assert [stage.name for stage in settings["stages"][0]] == TURNS
    assert "16 of tokens" in lowered.describe()
    assert group_of(stages=TURNS, unit=32).shape.unit == 32
    assert group_of(stages=TURNS, default=None, reads=None, ring_tokens=32).shape.unit == 16


@pytest.mark.parametrize("units", [(1, 64), (16, 16), (4, 4), (2, 8), None])
def test_it_is_refused_where_more_than_single_tokens_are_selected(units):
    """Their algorithms recompute the open unit from the ring, which is in other units."""
    told = refused(units=units, unit=16, stages=TURNS)
    who = "stage 'turns' turns tokens into units, and algorithm 'picks' does not select single"
    assert f"{who} tokens alone; leave the stage out (layers 0-3)" in told
    assert not any(ADVICE in text for text in told)


def test_it_is_refused_where_units_are_tokens():
    """Nobody has set a unit, and the backend reads tokens; or somebody has set 1."""
    for options in ({}, {"unit": 1}):
        (only,) = refused(**options, stages=TURNS, reads=None)
        assert "turns tokens into units of several tokens, got unit 1; set a larger" in only
    told = refused(unit=1, stages=TURNS)
    assert "(backend 'reads') takes units of 16 to 64 tokens, got 1: change unit (" in told[0]


@pytest.mark.parametrize(
    "stages", [["turns", "drops"], ["turns", "turns"], ["turns", "drops"] * 2]
)
def test_it_is_the_last_stage_and_the_only_one(stages):
    told = refused(unit=16, stages=stages)
    behind = ", ".join(map(repr, stages[1:]))
    assert f"no stage can stand behind it, got {behind}; list it last, once (layers" in told[0]
    assert group_of(unit=16, stages=["drops", "turns"]).regrained


def test_what_is_refused_says_that_it_would_help():
    (algorithm,) = refused(unit=16)
    assert "(algorithm 'picks') takes units of 1 to 1 tokens, got 16: change unit, or" in algorithm
    assert ADVICE in algorithm
    (backend,) = refused()
    assert "(backend 'reads') takes units of 16 to 64 tokens, got 1: change unit, or" in backend
    assert ADVICE in backend
    both = refused(unit=128, budget=256, ring_tokens=256, page_tokens=128)
    assert [ADVICE in text for text in both] == [True, False]
    assert all(ADVICE not in text for text in refused(units=(1, 8), unit=16))


def test_an_indexer_selects_tokens_too():
    model = ModelShape(2, 8, 1, 64, torch.bfloat16, 0.1, "mla", 56, IndexerShape(4, 32))
    options = {"model": model, "needs_index": True, "scope": "shared"}
    assert group_of(**options, unit=16, stages=TURNS).selected_as.unit == 1
    (only,) = refused(**options, unit=16)
    assert "takes units of 1 to 1 tokens, got 16: change unit, or add a stage" in only


def test_no_other_stage_stands_behind_an_indexer():
    model = ModelShape(2, 8, 1, 64, torch.bfloat16, 0.1, "mla", 56, IndexerShape(4, 32))
    options = {"model": model, "needs_index": True, "scope": "shared", "unit": 16}
    told = refused(**options, stages=["drops", "turns"])
    assert any("goes by the model's own indexer; leave stages out" in text for text in told)


def test_the_buffer_holds_a_unit_for_each_token():
    told = refused(unit=16, stages=TURNS, budget=46, buffer=256)
    assert told == [
        "buffer must hold the selection: 30 units of 16 tokens (each of 30 tokens may "
        "lie in one of its own), got 256 tokens = 16 units; raise buffer to 480 or lower "
        "budget (layers 0-3)"
    ]
    assert group_of(unit=16, stages=TURNS, budget=46, buffer=480).shape.buffer_slots == 30


def test_the_budget_holds_a_token_and_the_tail():
    (only,) = refused(unit=16, stages=TURNS, budget=16)
    assert "at least a unit and a token (17 tokens: one selected and the tail), got 16" in only
    assert group_of(unit=16, stages=TURNS, budget=17).selected_as.select == 1


def test_layers_allow_it_for_themselves():
    layers = {"2-": {"unit": 16, "stages": TURNS}}
    tokens, pages = low(reads=None, ring_tokens=32, layers=layers).groups
    assert (tokens.shape.unit, tokens.regrained) == (1, False)
    assert (pages.shape.unit, pages.regrained) == (16, True)
    assert (tokens.shape.layers, pages.shape.layers) == ((0, 1), (2, 3))
    (only,) = refused(unit=16, stages=TURNS, layers={"3": {"stages": []}})
    assert f"{ADVICE} (layers 3, sparse)" in only


def test_ids_of_tokens_stay_below_the_limit():
    """Representations are kept by token, however large the units are."""
    sizes = {"max_tokens": 2**31 - 1, "max_request_tokens": 2**15, "unit": 64, "buffer": 2**15}
    (only,) = refused(**sizes, stages=TURNS)
    assert "host units must be fewer than 2**31" in only
    assert low(**sizes, units=(64, 64))
