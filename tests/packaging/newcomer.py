"""The path of somebody new, timed: install from wheels, run the README's example, start a plugin.

    make newcomer

Wheels are built from sdists. Everything else happens in an empty directory, with a fresh
environment that pip fills from its index; of the checkout only the wheels, the pinned versions and
the text of the example are used. Exits with 1 at the first step that fails.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, STDOUT, run

from tests.packaging.environment import LEFT_OUT
from tests.packaging.packages import ROOT, build

PACKAGES = (
    "core",
    "plugins/quest",
    "plugins/triton_attention",
    "plugins/transformers",
    "tools/cli",
    "tools/evaluation",
)


class StepError(Exception):
    """A step failed; with what it wrote."""


@contextmanager
def step(what: str) -> Iterator[None]:
    """Say how long it took."""
    start = time.monotonic()
    yield
    print(f"{time.monotonic() - start:7.1f} s  {what}", flush=True)


def call(folder: Path, *command: object) -> str:
    """Output of a command in a folder; nothing of the checkout is on its path.

    Raises:
        StepError: it failed.
    """
    kept = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    # As on a machine of its own: no download but pip's, and the same examples in every run.
    kept |= {"HF_HUB_OFFLINE": "1", "CI": "true"}
    words = list(map(str, command))
    done = run(words, cwd=folder, env=kept, stdout=PIPE, stderr=STDOUT, text=True, check=False)
    if done.returncode:
        raise StepError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def example() -> str:
    """The first block of Python in the README."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]


def walk(here: Path) -> None:
    """All steps, in an empty folder."""
    wheels = here / "wheels"
    with step("(we) build six wheels"):
        core, *others = [build(ROOT / name, wheels)[1] for name in PACKAGES]
    python = here / "env" / "bin" / "python"
    pip = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    pinned = ("-c", shutil.copy(ROOT / "constraints.txt", here))
    with step("make an environment, and install torch"):
        call(here, sys.executable, "-m", "venv", here / "env")
        call(here, *pip, *pinned, "torch")
    with step("install topkv, quest, triton_attention, transformers, cli, evaluation"):
        call(here, *pip, *pinned, f"{core}[cli,testing]", *others)
    (here / "example.py").write_text(example(), encoding="utf-8")
    with step("run the README's example"):
        told = call(here, python, "example.py")
    print("".join(f"           | {line}\n" for line in told.splitlines()[-3:]), end="")
    with step("topkv new first-try --kind algorithm"):
        call(here, python, "-m", "topkv_cli", "new", "first-try", "--kind", "algorithm")
    with step("install it"):
        call(here, *pip, *pinned, "-e", "./topkv-first-try")
    with step("pass its kit"):
        told = call(here / "topkv-first-try", python, "-m", "pytest", "-q")
    print(f"           | {told.splitlines()[-1]}")


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="topkv-newcomer-") as here:
        try:
            with step("in all"):
                walk(Path(here))
        except StepError as error:
            print(error)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
