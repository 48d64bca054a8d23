"""The command: JSON alone on stdout, lazy commands, commands of other packages."""

from __future__ import annotations

import builtins
import importlib.metadata
import json
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import click
import pytest
from attrs import frozen
from click.testing import CliRunner

import topkv
from topkv import hookimpl
from topkv.entries import HOOK_API, TRAITS, Capabilities, PluginEntry
from topkv.plugins import PluginRegistry
from topkv_cli import main, probes
from topkv_cli.group import topkv as command

KEYS = {
    "name",
    "impls",
    "kind",
    "package",
    "version",
    "hook_api",
    "capabilities",
    "parameters",
    "problem",
    "not_importing",
}


@pytest.fixture
def broken(monkeypatch):
    """A registry in which one plugin does not load."""
    found = PluginRegistry([("topkv-broken", "7.1", SimpleNamespace())])
    for module in ("plugins", "doctor"):
        monkeypatch.setattr(f"topkv_cli.{module}.registry", lambda: found)
    monkeypatch.setattr("topkv_cli.attaching._PROBE", 1 << 22)


def run(*args):
    result = CliRunner().invoke(command, args)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.mark.usefixtures("broken")
def test_plugins_json_lists_what_loads_and_what_does_not():
    rows = json.loads(run("plugins", "--json").stdout)
    assert all(set(row) == KEYS for row in rows)
    lru = next(row for row in rows if row["name"] == "lru")
    api = ".".join(map(str, HOOK_API))
    assert (lru["kind"], lru["package"], lru["hook_api"]) == ("eviction", "topkv", api)
    assert lru["version"] == topkv.__version__
    assert lru["problem"] is None
    bad = next(row for row in rows if row["problem"])
    assert (bad["package"], bad["kind"], bad["hook_api"]) == ("topkv-broken", None, None)
    assert "implements none of" in bad["problem"]


@frozen
class ShortParams:
    """Parameters that several have.

    Attributes:
        seed: of what is drawn.
    """

    seed: int = 0


@frozen
class LongParams(ShortParams):
    """Parameters.

    Attributes:
        share, rest: what is kept of
            a page.
    """

    share: float = 0.5
    rest: int = 1
    bare: bool = False


@pytest.fixture
def long_names(monkeypatch):
    """Plugins as long in their names as those of this repository, and one that does not load."""
    capabilities = Capabilities(
        units=(1, 128),
        scopes=("kv_head", "shared"),
        attention=("gqa", "mla"),
        tiers=("gpu",),
        traits=tuple(TRAITS),
    )
    entry = PluginEntry("tensor_attention", "backend", "a:b", capabilities=capabilities)
    hook = hookimpl(lambda: [entry])
    stage = PluginEntry("long", "stage", "a:b", parameters=LongParams)
    stages = hookimpl(lambda: [stage])
    good = SimpleNamespace(topkv_register_backends=hook, topkv_register_stages=stages)
    offers = [("topkv-tensor-attention", "10.1.0", good), ("topkv-broken", "7.1", object())]
    monkeypatch.setattr("topkv_cli.plugins.registry", lambda: PluginRegistry(offers))


@pytest.mark.usefixtures("long_names")
@pytest.mark.parametrize("columns", ["80", "40"])
def test_people_can_read_the_plugins_at_80_columns(monkeypatch, columns):
    """Every name and version stands whole in its row, and what the kit asks is left out."""
    monkeypatch.setenv("COLUMNS", columns)
    lines = run("plugins").stdout.splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines)
    (row,) = (line for line in lines if line.startswith("tensor_attention"))
    assert row.split()[:4] == ["tensor_attention", "backend", "topkv-tensor-attention", "10.1.0"]
    text = " ".join(" ".join(lines).split())
    assert "units 1-128" in text
    assert "head_equivariant" not in text
    assert "topkv-broken 7.1" in text
    assert "does not load" in text
    assert "implements none of" in text


@pytest.mark.usefixtures("long_names")
def test_verbose_has_all_of_it(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = run("plugins", "--verbose").stdout
    assert all(len(line.rstrip()) <= 80 for line in shown.splitlines())
    words = shown.replace(",", " ").split()
    for word in (*TRAITS, "kv_head", "topkv-tensor-attention", "gpu", "traits:"):
        assert word in words
    assert "hook API " + ".".join(map(str, HOOK_API)) in shown
    assert "params.seed = 0: of what is drawn." in shown
    assert "params.share = 0.5: what is kept of a page." in shown
    assert "params.rest = 1: what is kept of a page." in shown
    assert "params.bare = False: " in shown
    assert "implements none of" in " ".join(shown.split())


@pytest.mark.usefixtures("broken")
def test_plugins_shows_the_same_to_people():
    shown = run("plugins").stdout
    assert "zero_copy" in shown
    assert "7.1" in shown


@pytest.mark.usefixtures("broken")
def test_doctor_json_is_alone_on_stdout():
    result = run("doctor", "--json")
    report = json.loads(result.stdout)
    assert "looking at" in result.stderr
    assert set(report) == {
        *probes.PROBES,
        *("never_tested", "attaching", "plugins", "plugins_failed"),
    }
    assert report["topkv"] == topkv.__version__
    assert report["host_memory"]["total_bytes"] >= report["host_memory"]["available_bytes"] > 0
    assert isinstance(report["devices"], list)
    assert report["cuda_host_register"]["works"] is (True if report["devices"] else None)
    rates = report["read_gb_per_s"]
    assert (rates["device_memory"] is None) == (not report["devices"])
    assert not report["devices"] or rates["device_memory"] > rates["host_memory"] > 0
    assert [row["package"] for row in report["plugins_failed"]] == ["topkv-broken"]


@pytest.mark.usefixtures("broken")
def test_doctor_shows_the_same_to_people():
    shown = run("doctor").stdout
    assert "GiB" in shown
    assert "topkv-broken" in shown
    assert "{" not in shown


def test_doctor_asks_plugins_of_their_libraries(monkeypatch):
    monkeypatch.setattr("topkv_cli.attaching._PROBE", 1 << 22)

    def offers(name, doctor):
        entry = PluginEntry(name=name, kind="backend", factories="none.such:Made", doctor=doctor)
        hook = hookimpl(lambda: [entry])
        return (f"topkv-{name}", "7.1", SimpleNamespace(topkv_register_backends=hook))

    said = ModuleType("said")

    def describe():
        print("a library says hello")
        return ["libthis: not installed", "libthat 2: used"]

    said.describe = describe
    monkeypatch.setitem(sys.modules, "said", said)
    found = PluginRegistry([offers("good", "said:describe"), offers("bad", "said:nothing")])
    monkeypatch.setattr("topkv_cli.doctor.registry", lambda: found)
    report = json.loads(run("doctor", "--json").stdout)["plugins"]
    assert report["backend good"] == ["libthis: not installed", "libthat 2: used"]
    assert "said:nothing" in report["backend bad"]["problem"]
    shown = run("doctor").stdout
    assert "libthat 2: used" in shown


def test_a_probe_that_fails_says_why_in_its_place():
    def probe():
        raise OSError("no such file")

    assert probes.attempt(probe) == {"problem": "OSError: no such file"}


def test_numa_is_read_from_the_system(tmp_path, monkeypatch):
    node = tmp_path / "devices/system/node/node1"
    node.mkdir(parents=True)
    (node / "meminfo").write_text("Node 1 MemTotal: 8 kB\nNode 1 MemFree: 4 kB\nNode 1 Huge: 3\n")
    device = tmp_path / "bus/pci/devices/0000:1b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    monkeypatch.setattr(probes, "_SYS", tmp_path)
    assert probes.numa_nodes() == [{"node": 1, "total_bytes": 8192, "free_bytes": 4096}]
    assert probes.numa_node_of_pci(0, 0x1B, 0) == 1
    assert probes.numa_node_of_pci(0, 0x1C, 0) is None
    (device / "numa_node").write_text("-1\n")
    assert probes.numa_node_of_pci(0, 0x1B, 0) is None


class FakePoint(importlib.metadata.EntryPoint):
    @property
    def dist(self):
        return SimpleNamespace(name="topkv-more", version="9")


@pytest.fixture
def contributed(monkeypatch):
    module = ModuleType("topkv_more_commands")
    module.hello = click.command("hello", help="Greet somebody.")(click.option("--name")(_hello))
    module.text = "no command"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    values = {
        "hello": "topkv_more_commands:hello",
        "text": "topkv_more_commands:text",
        "absent": "topkv_is_not_there:command",
    }
    points = [FakePoint(name, value, "topkv.commands") for name, value in values.items()]
    monkeypatch.setattr("topkv_cli.group.entry_points", lambda group: points)


def _hello(name):
    click.echo(f"hello {name}")


@pytest.mark.usefixtures("contributed")
def test_packages_contribute_commands():
    assert run("hello", "--name", "you").stdout == "hello you\n"
    lines = run("--help").stdout.splitlines()
    reported = {name: rest for name, _, rest in (line.strip().partition("  ") for line in lines)}
    assert reported["hello"].strip() == "Greet somebody."
    assert reported["absent"].strip() == "Does not load; topkv absent says why."
    for name in ("plugins", "doctor", "new"):
        assert reported[name].strip()


def test_help_says_what_each_command_does_and_imports_no_torch():
    code = (
        "import sys; from topkv_cli.group import topkv; topkv(['--help'], standalone_mode=False)"
    )
    heavy = "; print(sorted({'torch', 'triton', 'numpy', 'transformers'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code + heavy],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "80"},
        check=True,
    )
    *shown, loaded = done.stdout.splitlines()
    assert loaded == "[]"
    reported = [line.strip() for line in shown[shown.index("Commands:") + 1 :]]
    assert len(reported) >= 3
    for line in reported:
        assert line.endswith("."), "a text that is cut off ends with three dots"
        assert not line.endswith("...")
        assert "From topkv" not in line


def test_what_a_command_prints_at_its_import_is_not_on_stdout(tmp_path, monkeypatch):
    (tmp_path / "topkv_loud.py").write_text(
        "import click\nprint('hello from an import')\n"
        "hello = click.Command('hello', callback=lambda: click.echo('{}'))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    point = FakePoint("hello", "topkv_loud:hello", "topkv.commands")
    monkeypatch.setattr("topkv_cli.group.entry_points", lambda group: [point])
    result = run("hello")
    assert result.stdout == "{}\n"
    assert "hello from an import" in result.stderr


@pytest.mark.usefixtures("contributed")
@pytest.mark.parametrize(
    ("name", "reason"),
    [("absent", "No module named 'topkv_is_not_there'"), ("text", "is no click command but str")],
)
def test_a_command_that_does_not_load_says_why(name, reason):
    result = run(name, "--anything", "else")
    assert result.exit_code == 2
    assert reason in result.stderr
    assert "topkv-more 9" in result.stderr


def test_an_unknown_command_is_refused():
    assert run("nonsense").exit_code == 2


def test_version():
    assert topkv.__version__ in run("--version").stdout


def test_without_click_one_line_says_what_to_install(monkeypatch, capsys):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "click":
            raise ModuleNotFoundError("No module named 'click'", name="click")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    reported = capsys.readouterr().err
    assert reported.count("\n") == 1
    assert "needs click: pip install 'topkv[cli]'" in reported
