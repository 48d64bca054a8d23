"""A name that two packages offer belongs to neither, whichever of them sorts first."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import click
import pytest
import torch
from click.testing import CliRunner
from entry_points import FakePoint
from hypothesis import given
from hypothesis import strategies as st

from topkv import attach, hookimpl
from topkv.config import SparseConfig, lower
from topkv.entries import HOOK_API, KINDS, PluginEntry
from topkv.errors import CapabilityError, ConfigError, PluginError
from topkv.plugins import PluginRegistry, registry
from topkv.types import ModelShape
from topkv_cli.group import topkv as command
from topkv_cli.matrix import matrix

MODEL = ModelShape(2, 4, 2, 64, torch.bfloat16, 0.125)


def offer(*entries):
    """A plugin object that offers entries of any kinds."""
    plugin = SimpleNamespace()
    for kind in {entry.kind for entry in entries}:
        own = [entry for entry in entries if entry.kind == kind]
        setattr(plugin, f"topkv_register_{kind}s", hookimpl(lambda own=own: own))
    return plugin


def entry(name, kind="algorithm", **values):
    return PluginEntry(name, kind, "x:Y", **values)


def package(name, *entries):
    return (name, "1.0", offer(*entries))


@pytest.mark.parametrize("first", ["evil", "zz-evil"])
def test_a_name_that_two_packages_offer_is_refused_to_both(first):
    found = PluginRegistry(
        [package(first, entry("quest")), package("topkv-quest", entry("quest"), entry("other"))]
    )
    assert [record.name for record in found.usable("algorithm")] == ["other"]
    with pytest.raises(PluginError, match="installed and cannot be used") as caught:
        found.get("algorithm", "quest")
    reported = dict(reason.split(": ", 1) for reason in caught.value.reasons)
    assert set(reported) == {f"{first} 1.0", "topkv-quest 1.0"}
    # Each error names the package of the other, and how to keep this one.
    point = f"{first}:{first}"
    assert f"algorithm 'quest' is offered by {first} 1.0 too" in reported["topkv-quest 1.0"]
    assert f"uninstall {first}, or add {point} to TOPKV_BLOCK" in reported["topkv-quest 1.0"]
    assert "uninstall topkv-quest, or add topkv-quest:quest" in reported[f"{first} 1.0"]


def test_the_names_of_the_core_are_its_own():
    taken = [entry("zero_copy", "transfer"), entry("radix", "topk"), entry("mine", "topk")]
    found = PluginRegistry([package("evil", *taken)])
    for kind, name in (("transfer", "zero_copy"), ("topk", "radix")):
        assert found.get(kind, name).package == "topkv"
    assert found.get("topk", "mine").package == "evil"
    problems = {record.name: record.problem for record in found.records() if record.problem}
    assert set(problems) == {"zero_copy", "radix"}
    assert "the name is topkv's own" in problems["radix"]
    assert "evil" in problems["radix"]


def test_what_cannot_be_used_takes_no_name():
    late = entry("quest", hook_api=(HOOK_API[0] + 1, 0))
    found = PluginRegistry([package("evil", late), package("topkv-quest", entry("quest"))])
    assert found.get("algorithm", "quest").package == "topkv-quest"


def test_a_package_that_offers_a_name_twice_is_reported():
    found = PluginRegistry([package("topkv-quest", entry("quest"), entry("quest"))])
    with pytest.raises(PluginError, match="offers algorithm 'quest' twice; this is for the auth"):
        found.get("algorithm", "quest")


OFFERS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", "d"]),
        st.sampled_from(KINDS),
        st.sampled_from(["x", "lru"]),
    ),
    max_size=12,
)


@given(offers=OFFERS)
def test_a_name_is_used_where_one_alone_offers_it(offers):
    packages = [
        package(name, *(entry(each, kind) for who, kind, each in offers if who == name))
        for name in sorted({who for who, _, _ in offers})
    ]
    found = PluginRegistry(packages)
    for kind in KINDS:
        names = [record.name for record in found.usable(kind)]
        assert len(names) == len(set(names))
        for name in ("x", "lru"):
            owners = [who for who, *what in offers if what == [kind, name]]
            if (kind, name) == ("eviction", "lru"):
                owners = ["topkv"]
            assert (name in names) == (len(owners) == 1)
            if len(owners) == 1:
                assert found.get(kind, name).package == owners[0]


def test_a_name_in_dispute_never_makes_another_the_only_one():
    backend = entry("reads", "backend")
    rest = [package("topkv-quest", entry("quest")), package("else", entry("other"), backend)]

    def reasons(*packages):
        registry = PluginRegistry(packages)
        with pytest.raises(ConfigError) as caught:
            lower(SparseConfig(), MODEL, device=torch.device("cpu"), registry=registry)
        return " ".join(caught.value.reasons)

    assert "algorithm is not set and several are installed: other, quest" in reasons(*rest)
    reported = reasons(package("evil", entry("quest")), *rest)
    assert "algorithm is not set and several are installed: other, quest" in reported
    reported = reasons(package("evil", entry("quest")), rest[0], package("last", backend))
    assert "algorithm is not set" in reported
    assert "algorithm 'quest' is offered by topkv-quest 1.0 too" in reported


def test_neither_is_in_the_matrix():
    backend = package("reads", entry("reads", "backend"))
    one = PluginRegistry([package("topkv-quest", entry("quest")), backend])
    both = PluginRegistry([package("evil", entry("quest")), package("q", entry("quest")), backend])
    assert {cell.algorithm for cell in matrix(one.records())} == {"quest"}
    assert matrix(both.records()) == []


def test_attach_reports_engines_in_dispute():
    found = PluginRegistry([package(who, entry("runs", "engine")) for who in ("evil", "good")])
    with pytest.raises(CapabilityError) as caught:
        attach(object(), registry=found)
    assert "engine 'runs' is offered by evil 1.0 too" in str(caught.value)
    assert "engine 'runs' is offered by good 1.0 too" in str(caught.value)


# Entry points, and commands.


@pytest.fixture
def disputed(monkeypatch):
    """Two packages, each with an entry point ``quest`` for the same name, and a command."""
    points = []
    for who in ("evil", "good"):
        module = ModuleType(f"fake_{who}")
        vars(module).update(vars(offer(entry("quest"))))
        module.command = click.command("say")(lambda who=who: click.echo(who))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        points.append(FakePoint.of(who, "quest", module.__name__, "topkv"))
        value = f"{module.__name__}:command"
        for name in ("say", f"say-{who}", "doctor"):
            points.append(FakePoint.of(who, name, value, "topkv.commands"))

    def of(group):
        return [point for point in points if point.group == group]

    monkeypatch.setattr("topkv.plugins.records.entry_points", of)
    monkeypatch.setattr("topkv_cli.group.entry_points", of)
    registry.cache_clear()
    yield
    registry.cache_clear()


@pytest.mark.usefixtures("disputed")
def test_equal_entry_points_are_blocked_with_their_package(monkeypatch):
    assert PluginRegistry().usable("algorithm") == []
    monkeypatch.setenv("TOPKV_BLOCK", "other, evil:quest")
    assert PluginRegistry().get("algorithm", "quest").package == "good"
    monkeypatch.setenv("TOPKV_BLOCK", "quest")
    assert PluginRegistry().usable("algorithm") == []


def run(*args):
    return CliRunner().invoke(command, args)


@pytest.mark.usefixtures("disputed")
def test_a_command_that_two_packages_offer_is_refused(monkeypatch):
    done = run("say", "--any", "thing")
    assert done.exit_code == 2
    assert done.stdout == ""
    for text in ("evil 9", "good 9", "uninstall", "TOPKV_BLOCK", "evil:say", "good:say"):
        assert text in done.stderr
    assert run("say-evil").stdout == "evil\n"
    listed = run("--help").stdout
    assert "say-evil" in listed
    assert "Does not load; topkv say says why." in listed
    monkeypatch.setenv("TOPKV_BLOCK", "evil:say")
    assert run("say").stdout == "good\n"
    assert "Does not load" not in run("--help").stdout


@pytest.mark.usefixtures("disputed")
def test_the_commands_of_the_core_are_its_own():
    assert json.loads(run("doctor", "--json").stdout)["topkv"]
