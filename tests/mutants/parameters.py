"""Parameters of plugins that are checked badly, with one bug each."""

from __future__ import annotations

from core.tests import test_parameters as tests
from tests.mutants.lifecycle import LifecycleMutant
from tools.prefixes.tests import test_settings as kept
from topkv import parameters
from topkv.checks import Refused
from topkv.config.stages import Named
from topkv_prefixes.settings import PrefixSettings

typed, settled = parameters._typed, PrefixSettings.settled


def taking_bools(hint, value, who):
    """A bool is taken for an int."""
    return value if hint is int and isinstance(value, bool) else typed(hint, value, who)


def unnested(hint, value, who):
    """Reasons against a mapping of parameters are dropped."""
    try:
        return typed(hint, value, who)
    except Refused as error:
        return error.good


def unsettled(settings, known, config):
    """Reasons against what the parameters of a keeper name are dropped."""
    before = len(known.reasons)
    made = settled(settings, known, config)
    del known.reasons[before:]
    return made


def showing(plugin):
    """Parameters that are not made yet are shown with their values."""
    return f"{plugin.name}({plugin.params})"


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


def inside(_):
    tests.test_all_that_is_wrong_in_a_mapping_is_reported_with_the_rest()


def unknown_storage(_):
    asked = {"name": "shelf", "params": {"board": 1}}
    kept.test_a_setting_that_is_wrong_is_refused(asked, "unknown parameter 'board'")


def unlowered(_):
    kept.test_settings_that_are_not_lowered_yet_show_no_values()


BROKEN = {
    "a bool is an int": ("_typed", taking_bools, bools),
    "validators are not called": ("_validate", unlooked, together),
    "reasons are the arguments of errors": ("_text", first_alone, choices),
    "parameters may change": ("_is_frozen", thawed, classes),
    "reasons of parameters inside of others are lost": ("_typed", unnested, inside),
}

MUTANTS = [
    *(LifecycleMutant(name, parameters, *swap) for name, swap in BROKEN.items()),
    LifecycleMutant(
        "parameters of a storage are not looked at",
        *(PrefixSettings, "settled", unsettled, unknown_storage),
    ),
    LifecycleMutant(
        "values of parameters that are not made yet are shown",
        *(Named, "__repr__", showing, unlowered),
    ),
]
