"""Pages that are given back, with one bug each: in their package, and in stages that score."""

from __future__ import annotations

import numpy as np
import torch
from attrs import evolve

from tests.machines.dropping import run_dropping
from tests.mutants.harness import Mutant, name_of
from tests.mutants.lifecycle import LifecycleMutant, nothing
from tools.dropping.tests import test_dropping as tests
from topkv.plugins.discovery import hookimpl
from topkv.requests.requests import Requests
from topkv_dropping import dropping, stage
from topkv_dropping.dropping import Dropping
from topkv_dropping.stage import ScoresPages
from topkv_testing.models.stage_doubles import HEAVY, Heavy
from topkv_testing.stages import AlgorithmOptions, StageTests

_least, _drop, _take_out = Dropping._least, Dropping._drop, Dropping._take_out
_worth, _standard = Dropping._worth, dropping._standard


def best_first(self, slot, length):
    """The pages of the highest scores are given back."""
    return -_worth(self, slot, length)


def without_recent(self, slot, keeping):
    """The newest tokens may be given back too."""
    return _least(self, slot, evolve(keeping, recent=0))


def without_first(self, slot, keeping):
    """The first tokens may be given back too."""
    return _least(self, slot, evolve(keeping, first=0))


def raw(scores):
    """Lanes with large scores outvote the others."""
    return scores.double().mean(0)


def without_restore(self, slot, pages):
    """The device goes on with units by their old numbers."""
    restore = self.requests.restore
    self.requests.restore = nothing
    try:
        _drop(self, slot, pages)
    finally:
        self.requests.restore = restore


def without_flush(self, slot, pages):
    """The open unit is taken from the host, which lacks its newest tokens."""
    self.requests.dirty[slot] = False
    _drop(self, slot, pages)


def keeps_holding(self, slot, pages):
    """Pages leave the table, and their references stay."""
    table = self.requests.pages
    table.write(slot, 0, np.delete(table.of(slot), pages).tolist())


def one_too_many(self, slot, pages):
    """The page before each one that should go is given back in its place."""
    _take_out(self, slot, np.unique(np.maximum(pages - 1, 0)))


def by_what_is_left(self, slot, length):
    """Positions are counted anew, as units are."""
    dropped = self.requests.dropped[slot]
    self.requests.dropped[slot] = 0
    try:
        return _worth(self, slot, length)
    finally:
        self.requests.dropped[slot] = dropped


def forgets_what_went(self, slot):
    """A fork does not take over how many tokens its origin has given back."""
    twin = _fork(self, slot)
    self.dropped[twin] = 0
    return twin


_fork, _bind, _init = Requests.fork, ScoresPages.bind, Dropping.__init__


@hookimpl
def for_every_group(self, coordinator):
    """The stage of each group gives back pages of all layers."""
    links = (link for each in coordinator.layers for link in getattr(each.algorithm, "links", ()))
    return _bind(next(link.stage for link in links), coordinator)


def by_the_first_layer(self, requests, keeping, scores):
    """Other layers are not asked."""
    _init(self, requests, keeping, scores[:1])


def says_no_bound(self, requests, keeping, scores):
    """Who generates reserves room for everything."""
    _init(self, requests, keeping, scores)
    requests.bound = None


def refuses(on):
    """Configurations are refused by name."""
    tests.test_what_is_refused()


def bounds(on):
    """A coordinator says how long its requests get."""
    tests.test_who_generates_sees_how_long_a_request_gets()


def once(on):
    """Pages of two groups go once."""
    tests.test_one_stage_gives_back_the_pages_of_all_groups()


BOUND = {
    "every group gives back": (ScoresPages, "bind", for_every_group, once),
    "one layer is asked": (Dropping, "__init__", by_the_first_layer, once),
    "no bound is known": (Dropping, "__init__", says_no_bound, bounds),
    "an engine loses its pages": (stage, "_refusals", lambda config, found: (), refuses),
    "old numbers are used": (stage, "_chain_refusals", lambda chain: (), refuses),
}

GIVEN_BACK = {
    "the best pages go": (Dropping, "_worth", best_first),
    "the newest tokens go": (Dropping, "_least", without_recent),
    "the first tokens go": (Dropping, "_least", without_first),
    "lanes are not made alike": (dropping, "_standard", raw),
    "the device keeps the old numbers": (Dropping, "_drop", without_restore),
    "the newest tokens are not on the host": (Dropping, "_drop", without_flush),
    "pages that went are held for ever": (Dropping, "_take_out", keeps_holding),
    "another page goes": (Dropping, "_take_out", one_too_many),
    "positions are those of what is left": (Dropping, "_worth", by_what_is_left),
    "a twin does not know what went": (Requests, "fork", forgets_what_went),
}


class LeavesTheLast(Heavy):
    """The last page gets no score."""

    def keep(self, layer, slot, length, position, scores):
        super().keep(layer, slot, length, position, scores[:, :-1])


class GoesByHostPages(Heavy):
    """Pages are looked up as if they lay in order."""

    def keep(self, layer, slot, length, position, scores):
        table = layer.step.page_table
        order = torch.arange(table.shape[1], dtype=table.dtype, device=table.device)
        step = evolve(layer.step, page_table=order.expand_as(table))
        super().keep(evolve(layer, step=step), slot, length, position, scores)


class WritesPools(Heavy):
    """Keys are scaled where they lie."""

    def keep(self, layer, slot, length, position, scores):
        layer.pools["keys"].mul_(2)
        super().keep(layer, slot, length, position, scores)


def _mutant(broken: type) -> Mutant:
    factory = f"{broken.__module__}:{broken.__name__}"
    clean = evolve(HEAVY, name="heavy_clean")
    test = "test_every_page_has_a_score_of_its_own_request"
    entry = evolve(HEAVY, name="mutant", factories=factory)
    return Mutant(name_of(broken), StageTests, test, entry, clean, options=AlgorithmOptions())


MUTANTS = [
    *(LifecycleMutant(name, *swap, run_dropping) for name, swap in GIVEN_BACK.items()),
    *(LifecycleMutant(name, *swap) for name, swap in BOUND.items()),
    *map(_mutant, (LeavesTheLast, GoesByHostPages, WritesPools)),
]
