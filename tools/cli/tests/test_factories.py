"""``topkv plugins`` shows factories that do not import, and stays fast."""

from __future__ import annotations

import json
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
from click.testing import CliRunner

from topkv import hookimpl
from topkv.entries import PluginEntry
from topkv.plugins import PluginRegistry
from topkv_cli.group import topkv as command


@pytest.fixture(autouse=True)
def plugins(monkeypatch, tmp_path):
    """Plugins: one that is fine, one without its module, and two whose modules fail."""
    package = tmp_path / "topkv_made"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "good.py").write_text("Made = object\n")
    (package / "fails.py").write_text("raise RuntimeError('a driver is too old')\n")
    (package / "needs.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    factories = {
        "good": {"reference": "topkv_made.good:Made"},
        "gone": {"reference": "topkv_made.good:Made", "triton": "topkv_made.gone:Made"},
        "fails": {"reference": "topkv_made.fails:Made"},
        "needs": {"reference": "topkv_made.good:Made", "triton": "topkv_made.needs:Made"},
        "lacks": {"reference": "topkv_made.good:Absent"},
    }
    entries = [PluginEntry(name, "backend", each) for name, each in factories.items()]
    source = SimpleNamespace(topkv_register_backends=hookimpl(lambda: entries))
    found = PluginRegistry([("topkv-made", "7.1", source)])
    for module in ("plugins", "doctor"):
        monkeypatch.setattr(f"topkv_cli.{module}.registry", lambda: found)
    monkeypatch.setattr("topkv_cli.attaching._PROBE", 1 << 22)
    yield
    for name in [name for name in sys.modules if name.startswith("topkv_made")]:
        del sys.modules[name]


def run(*args):
    done = CliRunner().invoke(command, args)
    assert done.exit_code == 0, done.output
    return done.stdout


def reported(*args):
    rows = json.loads(run("plugins", "--json", *args))
    return {row["name"]: row["not_importing"] for row in rows if row["package"] == "topkv-made"}


def test_a_module_that_is_not_there_is_seen_without_importing_others():
    found = reported()
    assert found["gone"] == {"triton": "there is no module topkv_made.gone"}
    assert [name for name, factories in found.items() if factories] == ["gone"]
    assert "topkv_made.good" not in sys.modules
    assert "topkv_made.fails" not in sys.modules


def test_check_imports_every_implementation():
    found = reported("--check")
    assert found["good"] == {}
    assert [*found["gone"]] == ["triton"]
    assert "RuntimeError: a driver is too old" in found["fails"]["reference"]
    needed = "it needs no_such_library: pip install no_such_library, or set impl to 'reference'"
    assert needed in found["needs"]["triton"]
    assert "Absent" in found["lacks"]["reference"]


def test_people_see_the_same():
    text = " ".join(run("plugins").split())
    assert "topkv-made 7.1 (backend 'gone') does not import, triton: there is no module" in text
    assert "a driver is too old" not in text
    assert "a driver is too old" in " ".join(run("plugins", "--check").split())


def test_doctor_lists_them_beside_those_that_do_not_load(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    sys.modules["triton"].__spec__ = SimpleNamespace()
    failed = {row["name"]: row for row in json.loads(run("doctor", "--json"))["plugins_failed"]}
    assert {*failed} == {"gone", "fails", "needs", "lacks"}
    assert failed["fails"]["problem"].startswith("reference does not import: ")
    monkeypatch.setitem(sys.modules, "triton", None)
    failed = {row["name"] for row in json.loads(run("doctor", "--json"))["plugins_failed"]}
    assert failed == {"fails", "lacks"}


def test_the_list_imports_no_torch():
    code = (
        "import sys\nfrom topkv_cli.group import topkv\n"
        "topkv(['plugins'], standalone_mode=False)\n"
        "print(sorted({'torch', 'triton', 'numpy', 'transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
