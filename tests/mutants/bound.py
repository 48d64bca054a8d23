"""Stages that are bound to a coordinator, with one bug each in who binds and calls them."""

from __future__ import annotations

import numpy as np
from attrs import evolve

from core.tests import test_bind
from tests.mutants.lifecycle import LifecycleMutant
from topkv import coordinator
from topkv.assembly import stages as staged
from topkv.assembly.stages import Staged
from topkv.decode.layers import Forward

_bind, _spec = staged.bind_stages, Staged.spec


def binds(on):
    """Two groups are bound and called."""
    test_bind.test_a_stage_is_bound_once_a_group_and_called_before_pages_are_leased()


def states(on):
    """A stage ends the sharing of prefixes, behind another one too."""
    test_bind.test_a_stage_that_says_so_ends_the_sharing_of_prefixes(["keep", "bound"])


def never_called(algorithms, made):
    """Stages are bound, and what they return is lost."""
    _bind(algorithms, made)
    return []


def the_first_group(algorithms, made):
    """Groups behind the first are not bound."""
    return _bind([each for each in algorithms if isinstance(each, Staged)][:1], made)


def with_padding(algorithms, made):
    """Padded rows are handed on."""
    return [
        lambda slots, call=call: call(np.append(slots, -1)) for call in _bind(algorithms, made)
    ]


def leased_first(algorithms, made):
    """The pages of a forward are leased before."""

    def late(call):
        return lambda slots: (made.requests.own_pages(Forward(slots, None)), call(slots))

    return [late(call) for call in _bind(algorithms, made)]


def shared_still(self):
    """Prefixes are shared, whatever a stage says."""
    return evolve(_spec(self), prefix=self.algorithm.spec().prefix)


BROKEN = {
    "bound and never called": (coordinator, "bind_stages", never_called, binds),
    "one group is bound": (coordinator, "bind_stages", the_first_group, binds),
    "padded rows are handed on": (coordinator, "bind_stages", with_padding, binds),
    "called when pages are leased": (coordinator, "bind_stages", leased_first, binds),
    "prefixes are shared all the same": (Staged, "spec", shared_still, states),
}

MUTANTS = [LifecycleMutant(name, *swap) for name, swap in BROKEN.items()]
