"""Fresh environments with wheels of this repository and their requirements, and no more."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from email import message_from_bytes
from importlib import metadata
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.packages import ROOT, SETS, run

LEFT_OUT = ("PYTHONPATH", "PYTHONHOME", "TOPKV_BLOCK", "PYTEST_ADDOPTS")
"""Variables that would let other packages in."""


def declared(wheel: Path, extras: Iterable[str] = ()) -> list[Requirement]:
    """The requirements of a wheel, with those of some extras: ``"*"`` for all of them, but for
    those of the core that are sets of packages."""
    with ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        found = message_from_bytes(archive.read(name))
    wanted = list(extras)
    if "*" in wanted:
        wanted = [each for each in found.get_all("Provides-Extra") or [] if each not in SETS]
    lines = [Requirement(line) for line in found.get_all("Requires-Dist") or []]
    return [line for line in lines if _applies(line, wanted)]


def _applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


class Environment:
    """A virtual environment whose third-party packages are links to those of this process.

    Args:
        folder: where to make it.

    Attributes:
        python: its interpreter.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        self.python = folder / "bin" / "python"
        (self.site,) = folder.glob("lib/python*/site-packages")
        self._base = folder / "base"
        self._base.mkdir()
        (self.site / "base.pth").write_text(f"{self._base}\n")
        self._linked: set[tuple[str, str]] = set()
        self._installed: set[Path] = set()

    def add(self, requirements: Iterable[Requirement]) -> None:
        """Link what third-party requirements need, and what that needs in turn.

        Raises:
            RuntimeError: this process lacks a package, or has it in another version.
        """
        for requirement in requirements:
            for extra in ("", *requirement.extras):
                self._link(requirement, extra)

    def _link(self, requirement: Requirement, extra: str) -> None:
        name = canonicalize_name(requirement.name)
        if name.startswith("topkv") or (name, extra) in self._linked:
            return
        self._linked.add((name, extra))
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError as error:
            fix = f"{sys.executable} has no such package; install it there"
            raise RuntimeError(f"{requirement} is declared, and {fix}") from error
        if not requirement.specifier.contains(found.version, prereleases=True):
            fix = f"{sys.executable} has {found.version}; install one that is asked for"
            raise RuntimeError(f"{requirement} is declared, and {fix}")
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            link, target = self._base / top, Path(str(found.locate_file(top)))
            if target.exists() and not link.exists():
                link.symlink_to(target)
        inner = [Requirement(line) for line in found.requires or ()]
        self.add(each for each in inner if _applies(each, [extra]))

    def install(self, *wheels: Path, check: bool = True) -> None:
        """Install wheels as they are, those that are not there yet. With ``check`` every
        requirement has to be met then."""
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python)
        new = [wheel for wheel in wheels if wheel not in self._installed]
        if new:
            how = ("--quiet", "--force-reinstall", "--no-deps", "--no-index", "--no-compile")
            run(*pip, "install", *how, *new)
        if check:
            run(*pip, "check")
        self._installed |= {*new}

    def call(self, *args: object, cwd: Path = ROOT, **variables: str) -> tuple[int, str]:
        """Exit status and output of its interpreter, which sees nothing of the checkout."""
        kept = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
        # TRITON_INTERPRET: a plugin may be looked at where there is no GPU.
        kept |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", **variables}
        command = [str(self.python), "-P", *map(str, args)]
        with Popen(command, cwd=cwd, env=kept, stdout=PIPE, stderr=STDOUT, text=True) as process:
            reported, _ = process.communicate()
        return process.returncode, reported
