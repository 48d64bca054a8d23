"""Parameters of plugins that are checked badly, with one bug each."""

from __future__ import annotations

from core.tests import test_parameters as tests
from tests.mutants.lifecycle import LifecycleMutant
from topkv import parameters

typed = parameters._typed


def taking_bools(hint, value):
    """A bool is taken for an int."""
    return value if hint is int and isinstance(value, bool) else typed(hint, value)


def unlooked(each, value):
    """Validators are not called before an instance is made."""


def first_alone(error):
    """A reason is the text of all arguments of an error."""
    return str(error)


def thawed(made):
    """A class that is not frozen may be named."""
    return True


def bools(_):
    tests.test_each_wrong_value_is_named_with_what_was_expected(
        {"count": True}, "must be an int, got True"
    )


def together(_):
    tests.test_everything_that_is_wrong_is_reported_at_once_and_the_rest_is_kept()


def choices(_):
    tests.test_each_wrong_value_is_named_with_what_was_expected(
        {"kind": "c"}, "must be in ('a', 'b') (got 'c')"
    )


def classes(_):
    expected = "must be frozen, and Alike is not"
    tests.test_each_class_that_cannot_be_used_is_named(tests.Alike, expected)


BROKEN = {
    "a bool is an int": ("_typed", taking_bools, bools),
    "validators are not called": ("_validate", unlooked, together),
    "reasons are the arguments of errors": ("_text", first_alone, choices),
    "parameters may change": ("_is_frozen", thawed, classes),
}

MUTANTS = [LifecycleMutant(name, parameters, *swap) for name, swap in BROKEN.items()]
