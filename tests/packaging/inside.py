"""Checks inside of an environment: a script that imports nothing but topkv.

    python -P inside.py CHECK MODULE [OTHER ...]

Exits with 1 and a reason if the check fails, and prints what it saw if not.
"""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from importlib.metadata import distributions, entry_points
from importlib.util import find_spec
from types import ModuleType

UNDECLARED = {"sglang", "vllm"}
"""Engines that pin a torch of their own, so that no environment here has them. Modules that need
one import it, and are listed."""
HEAVY = {"torch", "triton", "numpy", "transformers"}
MODULES = 200
"""Modules that ``import topkv`` may bring, on any machine; it brings 166."""


def fail(reason: str) -> None:
    print(reason)
    sys.exit(1)


def _inside(module: ModuleType) -> None:
    where = str(module.__file__)
    if not where.startswith(sys.prefix):
        fail(f"{module.__name__} must come from {sys.prefix}, got {where}; is src importable?")


def check_alone(name: str, *needed: str) -> None:
    """Check that package and requirements come from wheels, and that nothing heavy is loaded."""
    import topkv
    from topkv.plugins import registry

    packages = {each.name.replace("-", "_") for each in distributions()}
    others = {each for each in packages if each.startswith("topkv")} - {"topkv", name, *needed}
    if others or any(find_spec(point.module) is None for point in entry_points(group="topkv")):
        found = ", ".join(sorted(others))
        fail(f"nothing of topkv but {name} and what it needs must be here, got {found}")
    _inside(topkv)
    _inside(importlib.import_module(name))
    records = registry().records()
    offered = [record for record in records if record.package.replace("-", "_") == name]
    reported = [f"{record.kind} {record.name}" for record in offered] or _commands(name)
    reported = reported or _modules(name)
    problems = [f"{record.who}: {record.problem}" for record in records if record.problem]
    if problems or not reported:
        fail(f"{name} must offer something and no plugin have a problem, got {problems or 'none'}")
    heavy = HEAVY & set(sys.modules)
    if heavy:
        fail(f"an entry module must import none of {sorted(HEAVY)}, got {', '.join(heavy)}")
    for record in offered:
        if record.entry and name != "topkv":
            for factory in record.entry.factories.values():
                _factory(factory.split(":")[0])
    print(", ".join(reported))


def _factory(name: str) -> None:
    """Import the module of a factory; kernels may lack triton, and nothing else."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise


def _commands(name: str) -> list[str]:
    """List what a package offers beside plugins: commands of topkv, and scripts."""
    points = [*entry_points(group="topkv.commands"), *entry_points(group="console_scripts")]
    return [
        f"command {point.name}"
        for point in points
        if point.dist and point.dist.name.replace("-", "_") == name
    ]


def _modules(name: str) -> list[str]:
    """List the modules of a package that is only imported."""
    path = importlib.import_module(name).__path__
    return [f"module {each.name}" for each in pkgutil.iter_modules(path)]


def check_modules(name: str) -> None:
    """Check that every module of the package imports, with all of its extras."""
    package = importlib.import_module(name)
    found = [each.name for each in pkgutil.walk_packages(package.__path__, f"{name}.")]
    left_out = [each for each in found if not _imports(each)]
    commands = [point.load().name for point in entry_points(group="topkv.commands")]
    reported = f"; {', '.join(left_out)} need an engine" if left_out else ""
    print(f"{len(found)} modules, commands: {', '.join(sorted(commands)) or 'none'}{reported}")


def _imports(name: str) -> bool:
    """Return True if a module imports, False if it needs an engine that is not here."""
    try:
        _inside(importlib.import_module(name))
    except ModuleNotFoundError as error:
        if error.name not in UNDECLARED:
            raise
        return False
    return True


def check_light(name: str) -> None:
    """Check that ``import topkv`` brings few modules: how long it takes depends on the machine."""
    counts = [len(_modules_after(code)) for code in ("pass", f"import {name}")]
    brought = counts[1] - counts[0]
    if brought > MODULES:
        fail(f"import {name} brings {brought} modules; at most {MODULES} are allowed")
    print(f"import {name}: {brought} modules")


def _modules_after(code: str) -> list[str]:
    command = [sys.executable, "-P", "-c", f"{code}; import sys; print(*sys.modules)"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def check_refused(name: str) -> None:
    """Check that every entry is refused for its hook API, and the text says how to fix it."""
    from topkv.plugins import registry

    found = [each for each in registry().records() if each.package.replace("-", "_") == name]
    for record in found:
        reported = str(record.problem)
        if not ("implements hook API" in reported and "Install" in reported):
            fail(f"{record.who} must be refused for its hook API, got {reported}; state hook_api")
    if not found:
        fail(f"{name} must be listed, with the reason why it is refused, and is not")
    print(found[0].problem)


if __name__ == "__main__":
    {
        "alone": check_alone,
        "modules": check_modules,
        "light": check_light,
        "refused": check_refused,
    }[sys.argv[1]](*sys.argv[2:])
