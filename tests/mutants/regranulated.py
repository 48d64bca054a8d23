"""Mutants of regranulation: of its formula, and of its use in the coordinator."""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve

from tests.mutants.lifecycle import LifecycleMutant, Run
from topkv.config import plans
from topkv.memory import SparseKVCacheManager
from topkv.ops import regranulate as ops
from topkv_testing.machines import scenarios
from topkv_testing.machines.regranulated import regranulated_machine
from topkv_testing.tiers import Tier


def scenario(play: scenarios.Scenario, **start: Any) -> Run:
    """One short life of requests whose selections are regranulated."""

    def run(on: Tier) -> None:
        scenarios.run_scenario(play, on, make=regranulated_machine, **{"fast": False, **start})

    return run


_regranulate = ops.regranulate


def units_repeat(tokens, closed, ids, extra, work, *, unit, impl):
    """A unit is listed once for each of its tokens, as far as there is room."""
    _regranulate(tokens, closed, ids, extra, work, unit=unit, impl=impl)
    end = closed.repeat_interleave(len(tokens) // max(1, len(closed)))[:, None] * unit
    counted = (tokens >= 0) & (tokens < end)
    listed = torch.where(counted, tokens // unit, 2**31 - 1).sort(1).values[:, : ids.shape[1]]
    ids.fill_(-1)
    ids[:, : listed.shape[1]] = torch.where(listed < 2**31 - 1, listed, -1)
    extra.copy_((ids >= 0).sum(1) * unit - counted.sum(1))


def open_unit_is_listed(tokens, closed, ids, extra, work, *, unit, impl):
    """Tokens of the tail unit, which is attended anyway, count and list it."""
    more = closed + (closed > 0).int()
    _regranulate(tokens, more, ids, extra, work, unit=unit, impl=impl)


def units_stand_as_selected(tokens, closed, ids, extra, work, *, unit, impl):
    """Units come in the order of their first tokens, not in ascending order."""
    _regranulate(tokens, closed, ids, extra, work, unit=unit, impl=impl)
    for lane, row in enumerate(tokens.tolist()):
        held = set(ids[lane].tolist()) - {-1}
        first = [unit_id for unit_id in dict.fromkeys(t // unit for t in row) if unit_id in held]
        ids[lane, : len(first)] = torch.tensor(first, dtype=torch.int32, device=ids.device)


def last_token_is_lost(tokens, closed, ids, extra, work, *, unit, impl):
    """The last token of each selection is dropped."""
    without = torch.cat([tokens[:, :-1], torch.full_like(tokens[:, :1], -1)], 1)
    _regranulate(without, closed, ids, extra, work, unit=unit, impl=impl)


def tail_competes(known, rule):
    """The newest token competes although the units are larger."""
    plan = _plan(known, rule)
    return evolve(plan, tail=known.plugin("algorithm", plan.algorithm).capabilities.tail)


_plan = plans.sparse_plan


def counts_outlive_their_request(self, slot):
    """Extra tokens of a request are those of the one before it, too."""
    kept = [store.before.clone() for store in self.stores]
    _forget(self, slot)
    for store, before in zip(self.stores, kept, strict=True):
        store.before.copy_(before)


_forget = SparseKVCacheManager.forget_slot

LONG = scenario(scenarios.a_long_request_rolls_back_and_goes_on)
EDGE = scenario(scenarios.a_prompt_fills_up_the_unit_that_decode_began, unit=4)
TURNS = scenario(scenarios.requests_take_turns_in_a_slot)
COMPETES = scenario(scenarios.a_long_request_rolls_back_and_goes_on, tail="selectable", spare=2)

MUTANTS = [
    LifecycleMutant(
        "a unit is listed once for each of its tokens",
        *(ops, "regranulate", units_repeat, LONG, ("cpu", "interpret")),
    ),
    LifecycleMutant(
        "the open unit is listed among the closed ones",
        *(ops, "regranulate", open_unit_is_listed, EDGE, ("cpu", "interpret")),
    ),
    LifecycleMutant(
        "units stand in the order of their tokens",
        *(ops, "regranulate", units_stand_as_selected, LONG),
    ),
    LifecycleMutant(
        "the last token of a selection is lost",
        *(ops, "regranulate", last_token_is_lost, LONG),
    ),
    LifecycleMutant(
        "a tail that competes is not forced where units are larger",
        *(plans, "sparse_plan", tail_competes, COMPETES),
    ),
    LifecycleMutant(
        "extra tokens outlive their request",
        *(SparseKVCacheManager, "forget_slot", counts_outlive_their_request, TURNS),
    ),
]
