"""Every rule of ``topkv share`` broken on purpose: the test beside it must fail."""

from __future__ import annotations

import inspect
import textwrap

import pytest

from tools.evaluation.tests import test_share as tests
from topkv_evaluation.share import calibrate, patterns
from topkv_evaluation.share.similarity import Shared


def rewritten(function, old, new):
    """Compile a function with one change of its source, which must have ``old`` once."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{old!r} must stand once in {function}; follow its change"
    made = {}
    names = inspect.unwrap(function).__globals__
    exec(compile(source.replace(old, new), "<mutant>", "exec"), names, made)
    return made[function.__name__]


pytest.importorskip("topkv_quest")  # by which the models of these tests select

BEST = patterns, "best_patterns", tests.check_the_best_of_all_patterns_is_found
SHARED = Shared, "of", tests.check_what_is_shared_is_what_loops_say
LOSSES = Shared, "losses", tests.check_what_is_shared_is_what_loops_say
HELD = calibrate, "held_in", tests.check_masses_are_those_of_float64
STEPS = calibrate, "_held", tests.check_masses_are_those_of_float64
EFFECT = tests, "effects_of", tests.check_masses_are_those_of_float64


def check_sources():
    tests.test_a_layer_goes_by_the_layer_that_the_core_takes("FSFS")


MUTANTS = {
    "the first layer shares": (*BEST, '{0: (0.0, "")}', '{0: (0.0, ""), 1: (0.0, "S")}'),
    "a run uses the first layer of all": (*BEST, "losses[first]", "losses[0]"),
    "a run begins where it loses most": (*BEST, "min(longer", "max(longer"),
    "layers use the first that selects": (
        *(patterns, "sources_of", check_sources),
        *('rindex("F", 0, layer + 1)', 'index("F")'),
    ),
    "layers use the next that selects": (
        *(patterns, "sources_of", check_sources),
        *('pattern.rindex("F", 0, layer + 1)', 'pattern.find("F", layer)'),
    ),
    "queries count by their mean": (*SHARED, "ratio.amin(0)", "ratio.mean(0)"),
    "lanes count by their least": (*SHARED, ".amin(0).mean(-1)", ".amin(0).amin(-1)"),
    "masses are over those of the layer that selects": (*SHARED, "[:, None]", "[:, :, None]"),
    "what has vanished is divided by": (
        *(Shared, "of", tests.test_a_mass_that_has_vanished_is_no_nan),
        *("own.clamp_min(TINY)", "own"),
    ),
    "the effect is that of the layer that selects": (
        *LOSSES,
        *("* self.effect", "* self.effect[:, None]"),
    ),
    "what is found is what is lost": (*LOSSES, "(1 - self.similarity)", "self.similarity"),
    "the layers are mixed up": (*HELD, "->fsl", "->sfl"),
    "lanes use others": (*HELD, "chosen.float()", "chosen.float().flip(1)"),
    "queries of the question count": (*STEPS, "step >= prompt.first", "step >= 0"),
    "the effect is the attention alone": (*EFFECT, "(x, both, dim=0)", "(x, both - x, dim=0)"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name, monkeypatch):
    owner, function, check, old, new = MUTANTS[name]
    monkeypatch.setattr(owner, function, rewritten(getattr(owner, function), old, new))
    with pytest.raises(AssertionError):
        check()
