"""Each package as a user installs it: from its wheel, with the core and what it declares.

    make isolation                     all of it
    make isolation ARGS=topkv-quest    some packages only

Wheels are those of ``make dist``. Each package gets an environment of its own, in which nothing of
the checkout can be imported; third-party packages are links to those of the interpreter that runs
this, and only to those that are declared. In each:

* the package is found, alone with the packages of this repository that it declares, and nothing
  heavy is imported for that; its factories import without its extras, its modules and commands
  with them; ``import topkv`` is fast;
* the conformance suite of one plugin of each kind runs with one example of each test, and that of
  a package that is named. Wheels differ from the checkout in files, which the modules show, and
  not in arithmetic: ``make test`` runs the tests themselves;
* under a core of the next major hook API these plugins are refused.

Then packages that do not load stand beside one that does, and what ``topkv new`` makes is built,
installed and tested. Exits with 1 if anything failed, after all of it was looked at.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from attrs import define, field
from packaging.requirements import Requirement

from tests.packaging.environment import Environment, declared
from tests.packaging.packages import DIST, ROOT, Package, build, packages
from topkv.entries import HOOK_API
from topkv_cli.render import KINDS, render, write

INSIDE = ROOT / "tests" / "packaging" / "inside.py"
SMOKED = {
    "quest",
    "top-p",
    "triton-attention",
    "triton-topk",
    "files",
    "prometheus",
    "transformers",
}
"""Plugins of each kind whose suites run."""

AT_ONCE = 2
"""Packages that are checked at the same time."""


@define
class Log:
    """The checks of one package, or of several together.

    Attributes:
        lines: one for each check, and more for one that failed.
        failures: the names of the checks that failed.
    """

    lines: list[str] = field(factory=list)
    failures: list[str] = field(factory=list)

    def head(self, text: str) -> None:
        self.lines.append(f"\n== {text}")

    def show(self) -> list[str]:
        """Print the lines, and return the failures."""
        print("\n".join(self.lines), flush=True)
        return self.failures

    def look(self, what: str, check: Callable[..., tuple[int, str]], *args: object) -> bool:
        """Run a check, which returns an exit status and a text, and log how it went."""
        start = time.monotonic()
        try:
            status, reported = check(*args)
        except RuntimeError as error:
            status, reported = 1, str(error)
        took = f"{time.monotonic() - start:5.1f} s"
        if status:
            self.failures.append(what)
            self.lines.append(f"FAILED {took}  {what}:\n{reported.rstrip()}")
        else:
            last = reported.rstrip().splitlines()[-1:] or ["done"]
            self.lines.append(f"ok     {took}  {what}: {last[0].strip('= ')}")
        return not status


def run_kit(environment: Environment, suite: Path) -> tuple[int, str]:
    """Run one example of each test of a conformance suite, by the interpreter of an environment.

    Tests that Triton interprets are left out.
    """
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.packaging.guard"]
    command += ["-m", "not gpu", "-k", "not interpret", str(suite)]
    return environment.call(*command, PYTHONPATH=str(ROOT), HYPOTHESIS_PROFILE="one")


TOOLS = [Requirement(name) for name in ("pytest", "pytest-timeout")]


class Isolation:
    """All checks, each of which returns a log.

    Args:
        work: directory for environments, and for wheels that are broken on purpose.
        named: packages that the caller has named.
    """

    def __init__(self, work: Path, named: list[str]) -> None:
        self.work = work
        self.smoked = {f"topkv-{name}" for name in SMOKED} | {*named}
        self.packages = packages()
        self.wheels = {each.name: DIST / each.wheel for each in self.packages}
        self.core = self.wheels["topkv"]
        copy = work / "next"
        shutil.copytree(ROOT / "core", copy, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "LICENSE", work)  # which the sdist takes from beside
        entries = copy / "src" / "topkv" / "entries.py"
        this, other = f"HOOK_API = {HOOK_API}", f"HOOK_API = ({HOOK_API[0] + 1}, 0)"
        entries.write_text(entries.read_text().replace(this, other))
        self.next_core = build(copy, work / "next-wheel")[1]

    def needed(self, wheels: list[Path], *extras: str) -> dict[Path, list[Requirement]]:
        """Requirements by wheel: of the core, of ``wheels``, and of all that these need in turn.

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
        """Install the core, further wheels, and their requirements, with some extras of each;
        with extras, every requirement has to be met."""
        needed = self.needed(wheels, *extras)
        for lines in needed.values():
            environment.add(lines)
        environment.install(*needed, check=bool(extras))
        return 0, ", ".join(wheel.name for wheel in needed)

    def one(self, package: Package) -> Log:
        """Check a package alone with its requirements; the core alone."""
        log = Log()
        log.head(package.name)
        wheels = [self.wheels[package.name]]
        there = self.needed(wheels)
        environment = Environment(self.work / f"env-{package.name}")
        if not log.look("install", self.install, environment, wheels):
            return log
        modules = [each.module for each in self.packages if self.wheels[each.name] in there]
        log.look("alone", environment.call, INSIDE, "alone", package.module, *modules)
        if package.name == "topkv":
            log.look("light", environment.call, INSIDE, "light", package.module)
        environment.add(TOOLS)
        log.look("install with extras", self.install, environment, wheels, "*")
        log.look("modules", environment.call, INSIDE, "modules", package.module)
        suite = package.folder / "tests" / "test_conformance.py"
        if package.name in self.smoked and suite.exists():
            log.look("kit, one example", run_kit, environment, suite)
        if package.is_plugin and package.name in self.smoked:
            log.look("refused by the next hook API", self.refused, environment, package)
        return log

    def refused(self, environment: Environment, package: Package) -> tuple[int, str]:
        environment.install(self.next_core)
        return environment.call(INSIDE, "refused", package.module)

    def started(self, name: str, kind: str, change: tuple[str, str] = ("", "")) -> Path:
        """Build the wheel of a package of ``topkv new``, after a change of its entry."""
        root = self.work / name
        write(render(name, kind), root)
        entry = root / "src" / f"topkv_{name}" / "entry.py"
        text = entry.read_text()
        if change[0] and text.count(change[0]) != 1:
            raise RuntimeError(f"{entry} must hold {change[0]!r} once; see the template")
        entry.write_text(text.replace(*change) if change[0] else text)
        return build(root, self.work)[1]

    def disturbed(self) -> Log:
        """Check four packages that cannot be used, beside one that can."""
        log = Log()
        log.head("packages that do not load, beside topkv-streaming-llm")
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
        log.look("install", self.install, environment, every, "*")
        newer = f"{HOOK_API[0]}.{HOOK_API[1] + 1}"
        reported = {
            "newer": f"Install a topkv that speaks {newer}",
            "older": "Install a newer topkv-older that implements",
            "absent": "No module named 'no_such_library'; reinstall topkv-absent",
            "exits": "SystemExit: 3; reinstall topkv-exits",
        }
        for name, text in reported.items():
            log.look(name, self.lists, environment, text)
        kit = good.folder / "tests" / "test_conformance.py"
        log.look("the good one", run_kit, environment, kit)
        return log

    def lists(self, environment: Environment, text: str) -> tuple[int, str]:
        """Check that ``topkv plugins`` succeeds and prints a text."""
        status, listed = environment.call("-m", "topkv_cli", "plugins", "--json")
        return (0, text) if text in listed and not status else (1, f"{text!r} not in:\n{listed}")

    def new(self) -> Log:
        """Check packages of ``topkv new``, made by the command of the wheel."""
        log = Log()
        log.head("topkv new")
        environment = Environment(self.work / "env-new")
        environment.add(TOOLS)
        log.look("install", self.install, environment, [], "*")
        for kind in KINDS:
            log.look(kind, self.new_kind, environment, kind)
        return log

    def new_kind(self, environment: Environment, kind: str) -> tuple[int, str]:
        """Make a package, install its wheel, and run its tests as its author's CI does.

        Of all kinds but one the tests are only collected, and kernels are left out of that one:
        ``tests/test_template.py`` runs all of them.
        """
        root = self.work / f"new-{kind}"
        command = ("-m", "topkv_cli", "new", f"my-{kind}", "--kind", kind, "--output", root)
        status, reported = environment.call(*command)
        if status:
            return status, reported
        environment.install(build(root, self.work)[1])
        # Hypothesis draws the same examples in every run where CI is set.
        how = ("-k", "not interpret") if kind == "algorithm" else ("--collect-only",)
        return environment.call("-m", "pytest", "-q", *how, cwd=root, CI="true")


def main(names: list[str]) -> int:
    start, failures = time.monotonic(), []
    known = {each.name for each in packages()}
    if not set(names) <= known:
        print(f"expected names of {', '.join(sorted(known))}, got {', '.join(names)}")
        return 2
    with tempfile.TemporaryDirectory(prefix="topkv-isolation-") as work:
        isolation = Isolation(Path(work), names)
        chosen = [each for each in isolation.packages if not names or each.name in names]
        # The longest first, so that nothing is waited for alone.
        checks: list[Callable[[], Log]] = [] if names else [isolation.new, isolation.disturbed]
        checks += [partial(isolation.one, package) for package in chosen]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for log in pool.map(lambda check: check(), checks):
                failures += log.show()
    print(f"\n== {time.monotonic() - start:.0f} s, {len(failures)} failed", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
