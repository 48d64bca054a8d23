"""Mutants of the stage ``regranulate``, and of the rules of the core for stages that regrain."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from attrs import evolve

from tests.machines import scenarios
from tests.machines.lifecycle import machine_of
from tests.machines.regrained import SCRIPTED_TOKENS, RegrainedMachine
from tests.mutants.lifecycle import LifecycleMutant, Run
from topkv.config import lowering, plans
from topkv.errors import ConfigError
from topkv.plugins.discovery import hookimpl
from topkv.types import Selection
from topkv_regranulate.entry import topkv_register_stages
from topkv_regranulate.stage import Regranulate
from topkv_testing.machines.lifecycle_model import doubles, make_coordinator
from topkv_testing.tiers import Tier


class Regranulated(RegrainedMachine):
    """The machine, with the stage of the package."""

    stage = "regranulate"
    further = tuple(topkv_register_stages())


def scenario(play: scenarios.Scenario, **start: Any) -> Run:
    """One short life of requests whose selections are regranulated."""

    def run(on: Tier) -> None:
        make = partial(machine_of, Regranulated)
        scenarios.run_scenario(play, on, make=make, **{"fast": False, **start})

    return run


def refused_out_of_order(on: Tier) -> None:
    """A stage behind one that turns tokens into units is refused."""
    sizes = {"unit": 4, "budget": 8, "buffer": 16, "ring_tokens": 8}
    with pytest.raises(ConfigError, match="no stage can stand behind it"):
        make_coordinator(
            on,
            registry=doubles(SCRIPTED_TOKENS),
            algorithm="scripted_tokens",
            stages=["to_units", "keep"],
            **sizes,
        )


_refine = Regranulate.refine


@hookimpl
def units_repeat(self, layer, q, candidates, out):
    """A unit is listed once for each of its tokens, as far as there is room."""
    unit = self.group.unit
    closed = (layer.step.lengths - 1).clamp(min=0) // unit
    end = closed.repeat_interleave(self.group.lane_heads)[:, None] * unit
    counted = (candidates.ids >= 0) & (candidates.ids < end)
    listed = torch.where(counted, candidates.ids // unit, 2**31 - 1).sort(1).values
    listed = listed[:, : out.ids.shape[1]]
    out.ids.fill_(-1)
    out.ids[:, : listed.shape[1]] = torch.where(listed < 2**31 - 1, listed, -1)
    return out


@hookimpl
def open_unit_is_listed(self, layer, q, candidates, out):
    """Tokens of the tail unit, which is attended anyway, list it."""
    lengths = layer.step.lengths
    more = lengths + self.group.unit * (lengths > 1)
    self.list_units(candidates.ids, more, out.ids, self.extra[layer.index, : len(out.ids)])
    return out


@hookimpl
def units_stand_as_selected(self, layer, q, candidates, out):
    """Units come in the order of their first tokens, not in ascending order."""
    _refine(self, layer, q, candidates, out)
    ids = out.ids
    for lane, row in enumerate(candidates.ids.tolist()):
        held, tokens = set(ids[lane].tolist()) - {-1}, [token for token in row if token >= 0]
        units = dict.fromkeys(token // self.group.unit for token in tokens)
        first = [unit for unit in units if unit in held]
        ids[lane, : len(first)] = torch.tensor(first, dtype=torch.int32, device=ids.device)
    return out


@hookimpl
def last_token_is_lost(self, layer, q, candidates, out):
    """The last token of each selection is dropped."""
    ids = candidates.ids
    without = torch.cat([ids[:, :-1], torch.full_like(ids[:, :1], -1)], 1)
    return _refine(self, layer, q, Selection(without), out)


def tail_competes(known, rule):
    """The newest token competes although the units are larger."""
    plan = _plan(known, rule)
    return evolve(plan, tail=known.plugin("algorithm", plan.algorithm).capabilities.tail)


_plan = plans.sparse_plan


LONG = scenario(scenarios.a_long_request_rolls_back_and_goes_on)
EDGE = scenario(scenarios.a_prompt_fills_up_the_unit_that_decode_began, unit=4)
COMPETES = scenario(scenarios.a_long_request_rolls_back_and_goes_on, tail="selectable", spare=2)

MUTANTS = [
    LifecycleMutant(
        "a unit is listed once for each of its tokens",
        *(Regranulate, "refine", units_repeat, LONG, ("cpu", "interpret")),
    ),
    LifecycleMutant(
        "the open unit is listed among the closed ones",
        *(Regranulate, "refine", open_unit_is_listed, EDGE, ("cpu", "interpret")),
    ),
    LifecycleMutant(
        "units stand in the order of their tokens",
        *(Regranulate, "refine", units_stand_as_selected, LONG),
    ),
    LifecycleMutant(
        "the last token of a selection is lost",
        *(Regranulate, "refine", last_token_is_lost, LONG),
    ),
    LifecycleMutant(
        "a tail that competes is not forced where units are larger",
        *(plans, "sparse_plan", tail_competes, COMPETES),
    ),
    LifecycleMutant(
        "a stage may stand behind one that regrains",
        *(lowering, "regrain_reasons", lambda *args: (), refused_out_of_order),
    ),
]
