"""Each package as a user installs it: from its wheel, with the core and what it declares.

    make isolation                     all of it
    make isolation ARGS=topkv-quest    some packages only

Wheels are built from sdists without network. Each package gets an environment of its own, in which
nothing of the checkout can be imported; third-party packages are links to those of the interpreter
that runs this, and only to those that are declared. In each:

* the package is found, alone with the packages of this repository that it declares, and nothing
  heavy is imported for that; its factories import without its extras, its modules and commands
  with them; ``import topkv`` is fast;
* its tests pass, with few examples. Left out are modules that name another package, which are
  listed, and what Triton interprets: wheels differ from the checkout in files, not in arithmetic,
  and ``make test`` runs all of it;
* under a core of the next major hook API a plugin is refused.

Then packages that do not load stand beside one that does, and what ``topkv new`` makes is built,
installed and tested. Exits with 1 if anything failed, after all of it was looked at.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from attrs import define, field
from packaging.requirements import Requirement

from tests.packaging.environment import Environment, declared
from tests.packaging.packages import ROOT, Package, build, packages
from topkv.entries import HOOK_API
from topkv_cli.render import KINDS, render, write

INSIDE = ROOT / "tests" / "packaging" / "inside.py"
SHARED = {"transformers"}
"""Names of plugins that are names of libraries too."""
CORE_TESTS = {"test_conformance.py", "test_hooks.py", "test_kit.py"}
"""Of the core, what depends on files and metadata that a wheel may lack."""


@define
class Log:
    """What was looked at, printed as it comes.

    Attributes:
        failures: what failed, in a line each.
    """

    failures: list[str] = field(factory=list)

    def head(self, text: str) -> None:
        print(f"\n== {text}", flush=True)

    def look(self, what: str, check: Callable[..., tuple[int, str]], *args: object) -> bool:
        """Run a check, which returns an exit status and a text, and say how it went."""
        start = time.monotonic()
        try:
            status, told = check(*args)
        except RuntimeError as error:
            status, told = 1, str(error)
        took = f"{time.monotonic() - start:5.1f} s"
        if status:
            self.failures.append(what)
            print(f"FAILED {took}  {what}:\n{told.rstrip()}", flush=True)
        else:
            last = told.rstrip().splitlines()[-1:] or ["done"]
            print(f"ok     {took}  {what}: {last[0].strip('= ')}", flush=True)
        return not status


def chosen_tests(package: Package, others: list[Package]) -> tuple[list[Path], list[str]]:
    """Test modules of a package that need no other, and why the rest is left out."""
    chosen, left_out = [], []
    for path in sorted((package.folder / "tests").rglob("test_*.py")):
        if package.name == "topkv" and path.name not in CORE_TESTS:
            left_out.append(f"{path.name} (arithmetic)")
            continue
        above = [parent / "conftest.py" for parent in path.parents if parent != ROOT]
        texts = [each.read_text() for each in above if each.exists()]
        # The conformance suite takes its fixtures from the kit, whatever the conftest has.
        texts = [path.read_text(), *(() if path.name == "test_conformance.py" else texts)]
        names = [other.name for other in others if any(names_it(text, other) for text in texts)]
        if names:
            left_out.append(f"{path.relative_to(package.folder)} ({', '.join(names)})")
        else:
            chosen.append(path)
    return chosen, left_out


def names_it(text: str, package: Package) -> bool:
    """Whether a test says the name of a package or of one of its plugins."""
    names = [point for point in package.points if point not in SHARED]
    quoted = [rf"[\"']{name}[\"']" for name in names]
    return re.search("|".join([rf"\b{package.module}\b", *quoted]), text) is not None


def run_tests(environment: Environment, where: list[Path]) -> tuple[int, str]:
    """The tests at these paths, by the interpreter of an environment."""
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.packaging.guard"]
    kinds = ["-m", "not gpu and not models", "-k", "not interpret"]
    kinds += ["-n", "2", "--dist", "loadfile"]
    command += [*kinds, *map(str, where)]
    return environment.call(*command, PYTHONPATH=str(ROOT), HYPOTHESIS_PROFILE="few")


TOOLS = [Requirement(name) for name in ("pytest", "pytest-timeout", "pytest-xdist")]


class Isolation:
    """All checks; ``log`` knows what failed.

    Args:
        work: directory for wheels and environments.
        log: where results go.
    """

    def __init__(self, work: Path, log: Log) -> None:
        self.work, self.log = work, log
        self.packages = packages()
        self.wheels = {each.name: build(each.folder, work)[1] for each in self.packages}
        self.core = self.wheels["topkv"]
        copy = work / "next"
        shutil.copytree(ROOT / "core", copy, ignore=shutil.ignore_patterns("__pycache__"))
        entries = copy / "src" / "topkv" / "entries.py"
        this, other = f"HOOK_API = {HOOK_API}", f"HOOK_API = ({HOOK_API[0] + 1}, 0)"
        entries.write_text(entries.read_text().replace(this, other))
        self.next_core = build(copy, work / "next-wheel")[1]
        log.head(f"{len(self.wheels)} wheels, built from sdists")

    def needed(self, wheels: list[Path], *extras: str) -> dict[Path, list[Requirement]]:
        """The core, further wheels and those that they declare in turn, and what each declares.

        ``extras`` are those of the core and of ``wheels``.
        """
        found: dict[Path, list[Requirement]] = {}
        steps = [(wheel, extras) for wheel in (self.core, *wheels)]
        for wheel, wanted in steps:  # it grows
            lines = declared(wheel, wanted)
            found.setdefault(wheel, []).extend(lines)
            ours = [line for line in lines if line.name in self.wheels]
            further = [(self.wheels[line.name], tuple(sorted(line.extras))) for line in ours]
            steps += [step for step in further if step not in steps]
        return found

    def install(
        self, environment: Environment, wheels: list[Path], *extras: str
    ) -> tuple[int, str]:
        """The core, further wheels, and what all of them declare, with some extras of each."""
        needed = self.needed(wheels, *extras)
        for lines in needed.values():
            environment.add(lines)
        environment.install(*needed)
        return 0, ", ".join(wheel.name for wheel in needed)

    def one(self, package: Package) -> None:
        """A package alone with what it needs; the core alone."""
        log = self.log
        log.head(package.name)
        wheels = [self.wheels[package.name]]
        there, later = self.needed(wheels), self.needed(wheels, "*")
        environment = Environment(self.work / f"env-{package.name}")
        if not log.look("install", self.install, environment, wheels):
            return
        modules = [each.module for each in self.packages if self.wheels[each.name] in there]
        log.look("alone", environment.call, INSIDE, "alone", package.module, *modules)
        log.look("time", environment.call, INSIDE, "time", package.module)
        environment.add(TOOLS)
        log.look("install with extras", self.install, environment, wheels, "*")
        log.look("modules", environment.call, INSIDE, "modules", package.module)
        others = [each for each in self.packages if self.wheels[each.name] not in later]
        where, left_out = chosen_tests(package, others)
        if left_out:
            print(f"       left out: {', '.join(left_out)}")
        if where:
            log.look(f"tests, {len(where)} modules", run_tests, environment, where)
        if package.is_plugin:
            log.look("refused by the next hook API", self.refused, environment, package)

    def refused(self, environment: Environment, package: Package) -> tuple[int, str]:
        environment.install(self.next_core)
        return environment.call(INSIDE, "refused", package.module)

    def started(self, name: str, kind: str, change: tuple[str, str] = ("", "")) -> Path:
        """The wheel of a package of ``topkv new`` in whose entry something is changed."""
        root = self.work / name
        write(render(name, kind), root)
        entry = root / "src" / f"topkv_{name}" / "entry.py"
        text = entry.read_text()
        if change[0] and text.count(change[0]) != 1:
            raise RuntimeError(f"{entry} must hold {change[0]!r} once; see the template")
        entry.write_text(text.replace(*change) if change[0] else text)
        return build(root, self.work)[1]

    def disturbed(self) -> None:
        """Four packages that cannot be used, beside one that can."""
        self.log.head("packages that do not load, beside topkv-streaming-llm")
        api, first = f"hook_api={HOOK_API}", "from topkv import hookimpl"
        changes = {
            "newer": (api, f"hook_api=({HOOK_API[0]}, {HOOK_API[1] + 1})"),
            "older": (api, f"hook_api=({HOOK_API[0] - 1}, 9)"),
            "absent": (first, f"{first}\nimport no_such_library"),
            "exits": (first, f"{first}\nraise SystemExit(3)"),
        }
        wheels = [self.started(name, "algorithm", change) for name, change in changes.items()]
        good = next(each for each in self.packages if each.name == "topkv-streaming-llm")
        environment = Environment(self.work / "env-disturbed")
        every = [*wheels, self.wheels[good.name]]
        environment.add(TOOLS)
        self.log.look("install", self.install, environment, every, "*")
        newer = f"{HOOK_API[0]}.{HOOK_API[1] + 1}"
        told = {
            "newer": f"Install a topkv that speaks {newer}",
            "older": "Install a newer topkv-older that implements",
            "absent": "No module named 'no_such_library'; reinstall topkv-absent",
            "exits": "SystemExit: 3; reinstall topkv-exits",
        }
        for name, text in told.items():
            self.log.look(name, self.lists, environment, text)
        kit = [good.folder / "tests" / "test_conformance.py"]
        self.log.look("the good one", run_tests, environment, kit)

    def lists(self, environment: Environment, text: str) -> tuple[int, str]:
        """Whether ``topkv plugins`` says a text and succeeds."""
        status, listed = environment.call("-m", "topkv_cli", "plugins", "--json")
        return (0, text) if text in listed and not status else (1, f"{text!r} not in:\n{listed}")

    def new(self) -> None:
        """What ``topkv new`` makes, by the command of the wheel."""
        self.log.head("topkv new")
        environment = Environment(self.work / "env-new")
        environment.add(TOOLS)
        self.log.look("install", self.install, environment, [], "*")
        for kind in KINDS:
            self.log.look(kind, self.new_kind, environment, kind)

    def new_kind(self, environment: Environment, kind: str) -> tuple[int, str]:
        """Make a package, install its wheel, and run its tests as its author's CI does."""
        root = self.work / f"new-{kind}"
        command = ("-m", "topkv_cli", "new", f"my-{kind}", "--kind", kind, "--output", root)
        status, told = environment.call(*command)
        if status:
            return status, told
        environment.install(build(root, self.work)[1])
        # Hypothesis draws the same examples in every run where CI is set.
        return environment.call("-m", "pytest", "-q", cwd=root, CI="true")


def main(names: list[str]) -> int:
    log, start = Log(), time.monotonic()
    known = {each.name for each in packages()}
    if not set(names) <= known:
        print(f"expected names of {', '.join(sorted(known))}, got {', '.join(names)}")
        return 2
    with tempfile.TemporaryDirectory(prefix="topkv-isolation-") as work:
        isolation = Isolation(Path(work), log)
        for package in isolation.packages:
            if not names or package.name in names:
                isolation.one(package)
        if not names:
            isolation.disturbed()
            isolation.new()
    log.head(f"{time.monotonic() - start:.0f} s, {len(log.failures)} failed")
    return 1 if log.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
