"""Whatever a package writes into its entries, the registry has records that can be used."""

from __future__ import annotations

import json
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from attrs import fields
from hypothesis import given
from hypothesis import strategies as st

from topkv import hookimpl
from topkv.config import SparseConfig, lower
from topkv.entries import HOOK_API, KINDS, Capabilities, PluginEntry
from topkv.errors import ConfigError, PluginError
from topkv.plugins import PluginRegistry
from topkv.types import ModelShape
from topkv_cli.matrix import matrix, rows_of
from topkv_cli.plugins import _all, as_dict

MODEL = ModelShape(2, 4, 2, 64, torch.bfloat16, 0.125)
FINE = {"name": "mine", "kind": "algorithm", "factories": "x:Y", "hook_api": HOOK_API}
READS = PluginEntry("reads", "backend", "x:Y")


def registry(make, kind="algorithm"):
    """Make a registry of one package whose hook of a kind returns ``make()``."""
    plugin = SimpleNamespace()
    setattr(plugin, f"topkv_register_{kind}s", hookimpl(make))
    reads = SimpleNamespace(topkv_register_backends=hookimpl(lambda: [READS]))
    return PluginRegistry([("mine", "1", plugin), ("reads", "1", reads)])


def problem(**values):
    found = registry(lambda: [PluginEntry(**{**FINE, **values})])
    (reported,) = (record.problem for record in found.records() if record.package == "mine")
    return reported


@pytest.mark.parametrize(
    ("name", "shown"),
    [(None, "None"), (3, "3"), ("", "''"), (" ", "' '"), ("a b", "'a b'"), ("a:b", "'a:b'")],
)
def test_a_name_that_is_none_is_a_problem_of_its_package(name, shown):
    assert f"name must be a str of letters, digits, '_', '-' and '.', got {shown};" in problem(
        name=name
    )
    found = registry(lambda: [PluginEntry(**{**FINE, "name": name}), PluginEntry(**FINE)])
    assert found.get("algorithm", "mine").package == "mine"
    assert found.get("backend", "reads").package == "reads"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"hook_api": "1.0"}, "hook_api must be a tuple (major, minor) of ints, got '1.0'"),
        ({"hook_api": (10**5000, 0)}, "hook_api must be a tuple"),
        ({"capabilities": None}, "capabilities must be a topkv.entries.Capabilities, got None"),
        ({"defaults": None}, "defaults must be a mapping with names for keys, got None"),
        ({"defaults": {1: 2}}, "defaults must be a mapping with names for keys, got {1: 2}"),
        ({"defaults": {"unit": "16"}}, "defaults['unit'] must be an int, got '16'"),
        ({"parameters": ["a"]}, "parameters must be an attrs class that is frozen"),
        ({"doctor": "x.y"}, "doctor must be 'module:function', or None, got 'x.y'"),
        ({"kind": "sampler"}, "must return entries of kind 'algorithm', got 'sampler'"),
    ],
)
def test_each_wrong_field_is_named(values, expected):
    reported = problem(**values)
    assert expected in reported
    assert "for the author of mine to fix" in reported


@pytest.mark.parametrize(
    "factories", [{}, {"cuda": "x:Y"}, {"triton": "x"}, {"triton": None}, "x.Y", None, {3: "x:Y"}]
)
def test_factories_are_places_by_implementation(factories):
    reported = problem(factories=factories)
    expected = "'module:attribute', or map 'reference' or 'triton' to that"
    assert f"factories must be {expected}, got " in reported
    assert "for the author of mine to fix" in reported


def test_one_place_stands_for_all_implementations():
    assert PluginEntry(**FINE).factories == {"reference": "x:Y", "triton": "x:Y"}
    one = PluginEntry(**{**FINE, "factories": {"triton": "x:Z"}})
    assert (one.impls, dict(one.factories)) == (("triton",), {"triton": "x:Z"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("units", value) for value in (16, (16,), ("1", "2"), (4, 2), (0, 4), [1, 2])),
        *(("scopes", value) for value in ("shared", ("shared", 1), ("everything",), ())),
        *(("attention", value) for value in (None, "gqa")),
        *(("kv_formats", value) for value in (None, "fp8")),
        *(("options", value) for value in (None, "sparse", ("sparse", 1))),
        *(("dtypes", value) for value in ("bfloat16", (torch.bfloat16,))),
        *(("head_dims", value) for value in (64, ("64",), (10**5000,))),
        *(("max_group", value) for value in ("8", 0, True)),
        *((name, 1) for name in ("needs_index", "softcap", "capture", "host_memory")),
        *(("tail", value) for value in (None, "free", ["forced"])),
        *(("tiers", value) for value in ("", ["cpu"], ("tpu",), ("cpu", 1))),
        *(("traits", value) for value in ({}, ("fast",))),
    ],
)
def test_each_wrong_capability_is_named(field, value):
    reported = problem(capabilities=Capabilities(**{field: value}))
    assert f"capabilities.{field} must be" in reported


def test_all_that_is_wrong_is_reported_at_once():
    wrong = Capabilities(units=3, capture="yes", tail="free", tiers=("tpu",), traits=("fast",))
    values = {"name": None, "kind": "sampler", "factories": {}, "doctor": 3, "defaults": 3}
    reported = problem(**values, capabilities=wrong)
    for field in ("name", "factories", "doctor", "defaults"):
        assert f"{field} must be" in reported
    for field in ("units", "capture", "tail", "tiers", "traits"):
        assert f"capabilities.{field} must be" in reported
    assert "got 'sampler'" in reported


def test_a_wrong_entry_is_found_by_its_name():
    found = registry(lambda: [PluginEntry(**{**FINE, "defaults": 3})])
    with pytest.raises(PluginError, match="'mine' is installed and cannot be used") as caught:
        found.get("algorithm", "mine")
    assert "mine 1: defaults must be a mapping" in str(caught.value)


def test_an_entry_that_cannot_be_read_is_a_problem_of_its_package():
    class Hostile(PluginEntry):
        @property
        def name(self):
            raise SystemExit("no name")

    hostile = Hostile.__new__(Hostile)
    object.__setattr__(hostile, "kind", "algorithm")
    found = registry(lambda: [hostile, PluginEntry(**FINE)])
    assert found.get("algorithm", "mine").package == "mine"
    with pytest.raises(PluginError, match="SystemExit: no name"):
        found.get("algorithm", "nothing")


def test_an_error_without_a_text_is_a_problem_of_its_package():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    def fail():
        raise Mute

    with pytest.raises(PluginError, match="topkv_register_algorithms failed: Mute; this is for"):
        registry(fail).get("algorithm", "mine")


SIMPLE = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=3)
    | st.sampled_from([2**70, object(), len, PluginEntry, KINDS, "x:Y", "cpu", "a.b:c"])
)
JUNK = st.recursive(
    SIMPLE,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.dictionaries(st.sampled_from(["unit", "scope", "params", "layers"]), inner)
    ),
    max_leaves=5,
)


def some(cls, fine):
    """Draw values for fields of a class, many of them junk."""
    return st.fixed_dictionaries(
        {},
        optional={field.name: fine.get(field.name, st.nothing()) | JUNK for field in fields(cls)},
    )


CAPABILITIES = some(
    Capabilities,
    {
        "units": st.tuples(st.integers(1, 8), st.integers(8, 64)),
        "scopes": st.sampled_from([("shared",), ("kv_head",), None]),
        "attention": st.sampled_from([("gqa",), ("gqa", "mla")]),
        "head_dims": st.sampled_from([(64,), None]),
        "tiers": st.just(("cpu",)),
        "traits": st.just(()),
        **{name: st.booleans() for name in ("needs_index", "capture", "host_memory")},
    },
)


@given(data=st.data())
def test_whatever_is_in_an_entry_the_registry_has_records(data):
    kind = data.draw(st.sampled_from(KINDS), "kind")
    fine = {name: st.just(value) for name, value in {**FINE, "kind": kind}.items()}
    values = {**FINE, "kind": kind, **data.draw(some(PluginEntry, fine), "entry")}
    if data.draw(st.booleans(), "capabilities"):
        values["capabilities"] = None
    junk = data.draw(CAPABILITIES, "in them")

    def make():
        if values.get("capabilities") is None:
            values["capabilities"] = Capabilities(**junk)
        return [PluginEntry(**values)]

    found = registry(make, kind)
    records = found.records()
    (record,) = (record for record in records if record.package == "mine")
    assert isinstance(record.name, str)
    assert (record in found.usable(kind)) == (record.problem is None)
    if record.problem is not None:
        assert len(record.problem) < 5000
        assert "mine" in record.problem
    # Every listing and question still works.
    for each in records:
        json.dumps(as_dict(each), default=str)
        _all(each.entry) if each.entry else []
    rows_of(matrix(records))
    with pytest.raises(PluginError):
        found.get("engine", "nothing")
    # A usable entry can be configured, or is refused with reasons.
    if kind in ("algorithm", "backend") and record.problem is None:
        named = {"backend": "reads", kind: record.name}
        with suppress(ConfigError):
            lower(SparseConfig(**named), MODEL, device=torch.device("cpu"), registry=found)


@given(data=st.data())
def test_no_wrong_entry_hides_another_of_its_package(data):
    values = {**FINE, "name": "wrong", **data.draw(some(PluginEntry, {}))}
    capabilities = data.draw(some(Capabilities, {}))

    def make():
        wrong = PluginEntry(**{"capabilities": Capabilities(**capabilities), **values})
        return [wrong, PluginEntry(**FINE)]

    reported = [record for record in registry(make).records() if record.package == "mine"]
    assert len(reported) == 2
    if values["name"] != "mine":
        assert registry(make).get("algorithm", "mine").package == "mine"
