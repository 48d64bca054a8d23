"""The packages of this repository, and the build of their sdists and wheels."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from attrs import frozen
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
"""The folder of sdists and wheels that ``make dist`` makes."""

SETS = ("transformers", "eval", "bench", "all")
"""Extras of the core that are sets of packages of this repository, and no needs of its own."""


@frozen
class Package:
    """One package, as its ``pyproject.toml`` has it.

    Attributes:
        folder: its folder.
        project: the table ``[project]``.
    """

    folder: Path
    project: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.project["name"])

    @property
    def version(self) -> str:
        return str(self.project["version"])

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def wheel(self) -> str:
        """The file name of its wheel."""
        return f"{self.module}-{self.version}-py3-none-any.whl"

    @property
    def is_plugin(self) -> bool:
        """True if it is in ``plugins``; the core is not, nor are packages in ``tools``."""
        return self.folder.parent.name == "plugins"

    @property
    def points(self) -> dict[str, str]:
        """Entry points of group ``topkv``."""
        return dict(self.project.get("entry-points", {}).get("topkv", {}))


def read(folder: Path) -> Package:
    """The package in a folder."""
    text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    return Package(folder, tomllib.loads(text)["project"])


def packages() -> list[Package]:
    """The core, then plugins and tools by name."""
    found = (*ROOT.glob("plugins/*/pyproject.toml"), *ROOT.glob("tools/*/pyproject.toml"))
    folders = [ROOT / "core", *(path.parent for path in found)]
    return sorted(map(read, folders), key=lambda package: (package.name != "topkv", package.name))


def brought_by(*lines: str) -> set[str]:
    """Names of the packages that some requirements install, with all that these declare."""
    known = {package.name: package.project for package in packages()}
    asked = [Requirement(line) for line in lines]
    for each in asked:  # it grows
        project = known[each.name]
        extras = project.get("optional-dependencies", {})
        declared = [
            *project["dependencies"],
            *(line for name in each.extras for line in extras[name]),
        ]
        ours = [line for line in map(Requirement, declared) if line.name in known]
        asked += [line for line in ours if line not in asked]
    return {each.name for each in asked}


def run(*args: object, cwd: Path = ROOT) -> str:
    """Run a command and return its output.

    Raises:
        RuntimeError: it failed; with what it wrote.
    """
    done = subprocess.run(
        list(map(str, args)), cwd=cwd, capture_output=True, text=True, check=False
    )
    if done.returncode:
        reported = (done.stdout + done.stderr).strip()
        raise RuntimeError(f"{' '.join(map(str, args))} ended with {done.returncode}:\n{reported}")
    return done.stdout


def build(folder: Path, out: Path) -> tuple[Path, Path]:
    """Build the sdist of a folder, and the wheel from the sdist. Needs hatchling, no network.

    Args:
        folder: of the package.
        out: where both go.

    Returns:
        The sdist and the wheel.
    """
    package = read(folder)
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", out, cwd=folder)
    stem = f"{package.module}-{package.version}"
    sdist = out / f"{stem}.tar.gz"
    with tempfile.TemporaryDirectory() as work:
        with tarfile.open(sdist) as archive:
            archive.extractall(work, filter="data")
        hatchling = (sys.executable, "-m", "hatchling", "build")
        run(*hatchling, "-t", "wheel", "-d", out, cwd=Path(work) / stem)
    return sdist, out / package.wheel
