"""Every ``pyproject.toml`` is as a release needs it; ``make dist`` checks what is built."""

from __future__ import annotations

import ast
import tomllib
from importlib import import_module
from itertools import pairwise

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import topkv
from tests.packaging.packages import ROOT, SETS, brought_by, packages, read, run
from topkv.entries import HOOK_API
from topkv.errors import PluginError
from topkv.plugins import PluginRegistry
from topkv.plugins.kinds import kinds
from topkv_evaluation.eval import ALGORITHMS
from topkv_evaluation.eval.choices import EXACT, split_algorithms

PACKAGES = packages()
PLUGINS = [package for package in PACKAGES if package.is_plugin]
TOOLS = [package for package in PACKAGES[1:] if not package.is_plugin]
CORE = PACKAGES[0].project


def parametrize(found):
    return pytest.mark.parametrize("package", found, ids=[each.name for each in found])


def test_the_core_says_its_version():
    assert CORE["version"] == topkv.__version__


@parametrize(PACKAGES)
def test_metadata_is_complete_and_alike(package):
    """Metadata but name, description and requirements is that of the core; plugins have a keyword
    more, by which they are found."""
    lacking = {"description", "readme", "license", "authors", "classifiers"} - set(package.project)
    assert not lacking, f"{package.name} lacks {lacking} in [project] of its pyproject.toml"
    alike = ("version", "readme", "license", "license-files", "requires-python", "authors")
    for key in alike:
        assert package.project.get(key) == CORE.get(key), f"{package.name}: {key}"
    listed = ["topkv-plugin"] if package.points else []  # see docs/directory.md
    assert package.project["keywords"] == CORE["keywords"] + listed
    typed = {"Typing :: Typed"}
    assert set(package.project["classifiers"]) | typed == set(CORE["classifiers"]) | typed
    assert package.folder.name in ("core", package.module.removeprefix("topkv_"))


@parametrize(PACKAGES)
def test_the_license_is_packed_and_a_readme_stands_beside(package):
    settings = tomllib.loads((package.folder / "pyproject.toml").read_text())["tool"]["hatch"]
    packed = settings["build"]["targets"]["sdist"]["force-include"]
    (taken,) = [path for path, name in packed.items() if name == "LICENSE"]
    assert (package.folder / taken).resolve() == ROOT / "LICENSE"
    assert (package.folder / "README.md").read_text().startswith(f"# {package.name}\n")


def asked(package):
    """Requirements of packages of this repository, with those of extras."""
    extras = package.project.get("optional-dependencies", {}).values()
    lines = [*package.project["dependencies"], *(line for extra in extras for line in extra)]
    return [line for line in map(Requirement, lines) if line.name.startswith("topkv")]


def entries_of(package):
    """Entries that a package registers."""
    modules = [import_module(target) for target in package.points.values()]
    hooks = [hook for each in modules for name, hook in vars(each).items() if "_register_" in name]
    return [entry for hook in hooks for entry in hook()]


def names_of(package):
    """Kinds and names of the plugins of a package."""
    return {(entry.kind, entry.name) for entry in entries_of(package)}


def defaults_of(package):
    """Kinds and names of the plugins that the plugins of a package choose by default."""
    stated = [entry.defaults.items() for entry in entries_of(package)]
    return {(kind, name) for each in stated for kind, name in each if kind in kinds()}


def held_by(extra):
    """Packages of a set, with those of the sets that it names."""
    lines = [Requirement(line) for line in CORE["optional-dependencies"][extra]]
    named = {line.name for line in lines} - {"topkv"}
    return named.union(*(held_by(inner) for line in lines for inner in line.extras))


def test_sets_hold_what_their_commands_need():
    """``topkv[transformers]`` runs the README's example, ``topkv[eval]`` the usual comparison."""
    offered = {name: package.name for package in PLUGINS for _, name in names_of(package)}
    example = {offered[name] for name in ("quest", "triton_attention", "transformers")}
    compared = [part.partition(":")[0] for part in split_algorithms(ALGORITHMS)]
    compared = {offered[name] for name in compared if name != EXACT}
    assert held_by("transformers") == {"topkv-cli", *example}
    assert held_by("eval") == {"topkv-evaluation", *compared} | held_by("transformers")
    wanted = {"topkv-bench", "topkv-evaluation", "topkv-simulate"}
    assert held_by("bench") == wanted | held_by("transformers")
    assert held_by("all") == {package.name for package in PACKAGES[1:]}


@parametrize(PLUGINS)
def test_a_plugin_that_is_not_installed_is_named_with_its_package(package, monkeypatch):
    """Names follow from a convention and the core's extras: no code of the core names a plugin."""
    needed = [f'{line}; extra == "all"' for line in CORE["optional-dependencies"]["all"]]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: needed)
    bare = PluginRegistry([])
    for kind, name in names_of(package) - {("topk", "pivot")}:  # it comes with who needs it
        with pytest.raises(PluginError) as refused:
            bare.get(kind, name)
        assert f"{package.name} does: pip install {package.name}" in str(refused.value)
    with pytest.raises(PluginError) as refused:
        bare.get("algorithm", "no-such")
    assert "pip install" not in str(refused.value)


def test_the_demo_installs_what_it_needs_and_no_more(tmp_path):
    """``make demo`` installs into an environment that is not there yet."""
    lines = run("make", "-n", "demo", f"VENV={tmp_path / 'venv'}").splitlines()
    (line,) = (line for line in lines if " -e " in line)
    folders = [word for before, word in pairwise(line.split()) if before == "-e"]
    installed = {read(ROOT / folder).name for folder in folders}
    assert installed == brought_by("topkv-evaluation", "topkv[transformers]")


def test_sets_are_known_to_what_installs_packages_alone():
    ours = {package.name for package in PACKAGES}
    extras = {
        extra: {Requirement(line).name for line in lines}
        for extra, lines in CORE["optional-dependencies"].items()
    }
    assert {extra for extra, names in extras.items() if len(names & ours) > 1} == {*SETS}


def imported_by(package):
    """Each top-level module that a package imports anywhere, with a file that does."""
    found = {}
    for path in (package.folder / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            found.update((name.split(".")[0], path) for name in names)
    return found


@parametrize(PLUGINS)
def test_a_plugin_imports_no_other(package):
    found = imported_by(package)
    others = {other.module for other in PLUGINS} - {package.module}
    assert not others & found.keys(), found


def test_the_core_imports_no_package_that_needs_it():
    """The conformance kit is among these packages."""
    found = imported_by(PACKAGES[0])
    others = {package.module for package in PACKAGES[1:]}
    assert "topkv_testing" in others
    assert not others & found.keys(), found


@parametrize([each for each in PACKAGES if each.module != "topkv_testing"])
def test_the_kit_is_for_tests(package):
    found = imported_by(package)
    assert "topkv_testing" not in found, found["topkv_testing"]


@parametrize(PACKAGES)
def test_packages_ask_for_a_range_of_each_other_that_holds_this_version(package):
    version = Version(topkv.__version__)
    above = Version(f"{version.major + 1}" if version.major else f"0.{version.minor + 1}")
    for each in asked(package):
        assert each.specifier.contains(version), f"{package.name} asks for {each}"
        assert not each.specifier.contains(above), f"{package.name} takes {above}: name a bound"


@parametrize(PLUGINS)
def test_a_plugin_asks_for_the_core_what_its_entries_name_and_tools_that_it_imports(package):
    """A tool may be a library of plugins: it registers nothing, and asks for the core alone."""
    others = [other for other in PLUGINS if other.name != package.name]
    named = {other.name for other in others if defaults_of(package) & names_of(other)}
    tools = [tool for tool in TOOLS if tool.module in imported_by(package)]
    assert {each.name for each in asked(package)} == {"topkv", *named, *(t.name for t in tools)}
    assert Requirement(package.project["dependencies"][0]).name == "topkv"
    for tool in tools:
        assert brought_by(tool.name) == {"topkv", tool.name}


@parametrize(TOOLS)
def test_a_tool_is_no_plugin(package):
    """Else a plugin that imports the tool would import another plugin. One that brings a kind of
    plugins may have a plugin that uses these."""
    assert not package.points or "topkv.kinds" in package.project["entry-points"]
    assert "topkv" in {each.name for each in asked(package)}


ENTRIES = ("PluginEntry", "StorageEntry")


@parametrize(PLUGINS)
def test_entries_state_their_hook_api(package):
    """The version is a literal: the default is that of the core which happens to be there."""
    for target in package.points.values():
        source = (package.folder / "src" / f"{target.replace('.', '/')}.py").read_text()
        calls = [
            node
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ENTRIES
        ]
        assert calls
        for call in calls:
            stated = {word.arg: word.value for word in call.keywords}.get("hook_api")
            assert isinstance(stated, ast.Tuple), f"{target} must state hook_api={HOOK_API}"
            major, minor = ast.literal_eval(stated)
            assert major == HOOK_API[0]
            assert minor <= HOOK_API[1]


@parametrize(PLUGINS)
def test_entry_points_lead_to_hooks(package):
    for target in package.points.values():
        hooks = [name for name in vars(import_module(target)) if name.startswith("topkv_register")]
        assert hooks, f"{target} registers nothing"
