"""Discovery: one broken package never breaks another, and every problem says how to fix it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from entry_points import FakePoint

import topkv
from topkv import hookimpl
from topkv.entries import HOOK_API, Capabilities, PluginEntry
from topkv.errors import PluginError
from topkv.hooks.algorithm import AlgorithmSpec
from topkv.plugins import PluginRegistry, registry
from topkv.plugins.records import installed

PAGE = "To hook API 3"


def offer(*entries, kind="observer"):
    """A plugin object that offers entries of one kind."""

    def register():
        return list(entries)

    plugin = SimpleNamespace()
    setattr(plugin, f"topkv_register_{kind}s", hookimpl(register))
    return plugin


def entry(name="watcher", kind="observer", **values):
    return PluginEntry(name, kind, "x:Y", **values)


def problems(found):
    return {record.package: record.problem for record in found.records() if record.problem}


def test_the_core_brings_its_own_entries():
    records = PluginRegistry([]).records()
    assert [(record.kind, record.name, record.package) for record in records] == [
        ("eviction", "lru", "topkv"),
        ("host_format", "model", "topkv"),
        ("kv_format", "model", "topkv"),
        ("topk", "radix", "topkv"),
        ("transfer", "zero_copy", "topkv"),
    ]
    assert all(record.version == topkv.__version__ for record in records)


def test_installed_packages_are_discovered_once():
    found = {(record.kind, record.name): record for record in registry().records()}
    for kind, name in (
        ("algorithm", "quest"),
        ("backend", "triton_attention"),
        ("engine", "transformers"),
    ):
        record = found[kind, name]
        assert record.problem is None
        assert record.package == f"topkv-{name.replace('_', '-')}"
    assert registry() is registry()


class Raises:
    @hookimpl
    def topkv_register_algorithms(self):
        raise KeyError("weights")

    @hookimpl
    def topkv_register_observers(self):
        return [entry("half")]


class Misspelt:
    @hookimpl
    def topkv_register_algorithm(self):
        return []


class Unknown:
    """A hook that a later core may have, and that this one ignores."""

    @hookimpl(optionalhook=True)
    def topkv_register_of_a_later_core(self):
        raise AssertionError("nobody asks")


class Arguments:
    @hookimpl
    def topkv_register_algorithms(self, model):
        return []


BROKEN = {
    "raises": (Raises(), "topkv_register_algorithms failed: KeyError: 'weights'"),
    "misspelt": (Misspelt(), "topkv_register_algorithm"),
    "arguments": (Arguments(), "model"),
    "unknown": (Unknown(), "it implements none of topkv_register_algorithms"),
    "empty": (SimpleNamespace(), "it implements none of topkv_register_algorithms"),
    "no-entry": (offer("watcher"), "must return a list of PluginEntry, got str"),
    "nothing": (offer(kind="backend"), None),
    "wrong-kind": (
        offer(entry("w"), kind="backend"),
        "topkv_register_backends must return entries of kind 'backend', got 'observer'",
    ),
    "taken": (
        offer(entry("lru", kind="eviction"), kind="eviction"),
        "the name is topkv's own, which offers eviction 'lru' itself",
    ),
    "newer": (offer(entry("n", hook_api=(HOOK_API[0], HOOK_API[1] + 1))), "speaks"),
    "api-text": (offer(entry("t", hook_api="1.0")), "must be a tuple (major, minor)"),
    "caps": (offer(entry("c", capabilities={})), "must be a topkv.entries.Capabilities, got {}"),
}


def test_broken_plugins_break_no_other():
    right = ("right", "2.0", offer(entry()))
    last = ("zz-last", "1", offer(entry("last")))
    broken = [(name, "1", plugin) for name, (plugin, _) in BROKEN.items()]
    found = PluginRegistry([broken[0], right, *broken[1:], last])
    usable = {record.name for record in found.usable("observer")}
    assert usable == {"watcher", "last", "half"}
    assert found.get("observer", "watcher").package == "right"
    reported = problems(found)
    for name, (_, expected) in BROKEN.items():
        if expected is not None:
            assert expected in reported[name], name
    assert set(reported) == {name for name, (_, expected) in BROKEN.items() if expected}


def test_the_same_object_twice_is_a_problem_of_both():
    plugin = offer(entry())
    found = PluginRegistry([("first", "1", plugin), ("second", "1", plugin)])
    assert "observer 'watcher' is offered by second 1 too" in problems(found)["first"]
    assert "observer 'watcher' is offered by first 1 too" in problems(found)["second"]


@pytest.mark.parametrize(
    ("api", "fix"),
    [((4, 0), "a topkv that speaks 4.0"), ((3, 1), "speaks 3.1"), ((2, 7), "a newer topkv-w")],
)
def test_a_wrong_hook_api_is_refused_before_the_factory_is_imported(api, fix):
    late = PluginEntry("w", "observer", "does.not.exist:Late", hook_api=api)
    with pytest.raises(PluginError) as caught:
        PluginRegistry([("topkv-w", "0.3.1", offer(late))]).create("observer", "w", None)
    text = str(caught.value)
    assert (
        f"topkv-w 0.3.1 (entry point 'w') implements hook API {api[0]}.{api[1]}; this topkv "
        f"{topkv.__version__} speaks {HOOK_API[0]}.{HOOK_API[1]}"
    ) in text
    assert fix in text
    assert (f"the page '{PAGE}' of the documentation says what to change" in text) == (api < (3,))
    assert "exist" not in text


class Capable:
    """An entry module that was written against hook API 1: its arguments are gone."""

    def __init__(self, of, **values):
        self.of, self.values = of, values

    @hookimpl
    def topkv_register_observers(self):
        self.of(**self.values)


@pytest.mark.parametrize(
    ("of", "values", "argument"),
    [
        (Capabilities, {"impls": ("reference",)}, "impls"),
        (PluginEntry, {"name": "w", "kind": "observer", "factory": "a:b"}, "factory"),
        (AlgorithmSpec, {"prefix_shareable": True}, "prefix_shareable"),
    ],
)
def test_an_entry_module_of_an_older_api_is_refused_by_name(of, values, argument):
    found = PluginRegistry([("topkv-w", "0.3.1", Capable(of, **values))])
    with pytest.raises(PluginError) as caught:
        found.get("observer", "w")
    text = str(caught.value)
    assert "topkv-w 0.3.1: topkv_register_observers failed: TypeError" in text
    assert f"'{argument}'" in text
    assert f"the page '{PAGE}' of the documentation says what to change" in text


def test_the_page_that_messages_name_is_in_the_documentation():
    root = Path(__file__).parents[2]
    assert "- migration.md\n" in (root / "mkdocs.yml").read_text()
    assert (root / "docs" / "migration.md").read_text().startswith(f"# {PAGE}\n")


def test_an_older_minor_loads(monkeypatch):
    monkeypatch.setattr("topkv.plugins.records.HOOK_API", (3, 3))
    found = PluginRegistry([("old", "1", offer(entry(hook_api=(3, 0))))])
    assert found.get("observer", "watcher").problem is None


def test_an_unknown_name_lists_what_there_is():
    found = PluginRegistry([("right", "2.0", offer(entry()))])
    with pytest.raises(PluginError, match="unknown observer 'my_watcher'") as caught:
        found.get("observer", "my_watcher")
    reported = str(caught.value)
    assert "installed of kind observer: watcher; did you mean 'watcher'? no installed" in reported
    with pytest.raises(PluginError, match="installed of kind topk: radix; no installed package"):
        found.get("topk", "cuda")
    # Else code would come from whoever registers a distribution of a name that is free.
    assert "pip install" not in reported
    with pytest.raises(PluginError, match="the kinds are algorithm, stage, backend"):
        found.get("sampler", "x")


@pytest.fixture
def points(monkeypatch):
    module = ModuleType("topkv_fake_entry")
    module.topkv_register_observers = hookimpl(lambda: [entry("fine")])
    exits = ModuleType("topkv_fake_exit")
    exits.__getattr__ = lambda name: sys.exit(3)
    for each in (module, exits):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    values = {
        "absent": "topkv_is_not_there",
        "exit": "topkv_fake_exit:anything",
        "fine": "topkv_fake_entry",
    }
    points = [FakePoint(name, value, "topkv") for name, value in values.items()]
    monkeypatch.setattr("topkv.plugins.records.entry_points", lambda group: points)
    return points


@pytest.mark.usefixtures("points")
def test_entry_points_that_do_not_import_are_kept_with_the_reason():
    found = PluginRegistry()
    assert [record.name for record in found.usable("observer")] == ["fine"]
    assert "ModuleNotFoundError: No module named 'topkv_is_not_there'" in str(problems(found))
    assert "SystemExit" in problems(found)["topkv-exit"]
    with pytest.raises(PluginError, match="installed and cannot be used") as caught:
        found.get("algorithm", "absent")
    assert "topkv-absent 9" in str(caught.value)
    assert "reinstall topkv-absent" in str(caught.value)
    with pytest.raises(PluginError, match="did not load: topkv-absent 9"):
        found.get("algorithm", "something")


@pytest.mark.usefixtures("points")
def test_blocked_entry_points_are_not_loaded(monkeypatch):
    monkeypatch.setenv("TOPKV_BLOCK", "exit, fine")
    found = PluginRegistry()
    assert [record.name for record in found.usable("observer")] == []
    assert "TOPKV_BLOCK" in problems(found)["topkv-exit"]
    with pytest.raises(PluginError, match="left out by the environment variable TOPKV_BLOCK"):
        found.get("observer", "fine")


@pytest.mark.usefixtures("points")
def test_further_plugins_stand_beside_what_is_installed(monkeypatch):
    further = ("further", "1", offer(entry("more")))
    found = PluginRegistry([*installed(), further])
    assert [record.name for record in found.usable("observer")] == ["fine", "more"]
    assert found.get("observer", "fine").point == "topkv-fine:fine"
    assert set(problems(found)) == {"topkv-absent", "topkv-exit"}
    monkeypatch.setenv("TOPKV_BLOCK", "fine,more")
    found = PluginRegistry([*installed(), further])
    assert [record.name for record in found.usable("observer")] == ["more"]


@pytest.mark.parametrize(
    "code",
    [
        "from topkv.plugins import registry; assert registry().records()",
        "from topkv_cli.group import topkv; topkv(['plugins', '--json'], standalone_mode=False)",
        "from topkv_cli.group import topkv; topkv(['--help'], standalone_mode=False)",
    ],
)
def test_listing_imports_neither_torch_nor_triton(code):
    code += "\nimport sys; heavy = {'torch', 'triton', 'numpy', 'transformers'} & set(sys.modules)"
    code += "\nassert not heavy, heavy"
    environment = {name: value for name, value in os.environ.items() if name != "TOPKV_BLOCK"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_capabilities_of_an_entry_are_what_it_says():
    caps = Capabilities(units=(1, 8))
    found = PluginRegistry([("right", "2.0", offer(entry(capabilities=caps)))])
    assert found.get("observer", "watcher").entry.capabilities == caps
