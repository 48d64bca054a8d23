"""The path of somebody new, timed: the README from its install to a plugin of one's own.

    make newcomer
    make newcomer ARGS=5.17          with this minor version of Transformers
    make newcomer TORCH_INDEX=URL    with another index of CPU builds of torch than the README's

Every block of the README that ``tests/readme.py`` gives to this file is run as it is written, in
a fresh environment that pip fills from its index: the install in the clone, everything else in an
empty directory. Of the checkout only that, and the pinned versions, are used. Exits with 1 at the
first step that fails.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, STDOUT, run

from tests.packaging.environment import LEFT_OUT
from tests.packaging.packages import ROOT
from tests.readme import block

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""The index of torch that the README names."""


class StepError(Exception):
    """A step failed; with what it wrote."""


@contextmanager
def step(what: str) -> Iterator[None]:
    """Print how long a step took."""
    start = time.monotonic()
    yield
    print(f"{time.monotonic() - start:7.1f} s  {what}", flush=True)


class Shell:
    """Commands in a fresh environment, which nothing of the checkout is on the path of.

    Args:
        here: an empty folder, where the environment is made.
        pinned: the pinned versions, which pip keeps to.
    """

    def __init__(self, here: Path, pinned: Path) -> None:
        self.here = here
        kept = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
        # As on a machine of its own: no download but pip's, and the same examples in every run.
        kept |= {"HF_HUB_OFFLINE": "1", "CI": "true", "PIP_CONSTRAINT": str(pinned)}
        self.environment = kept | {"PATH": f"{here / 'env' / 'bin'}{os.pathsep}{kept['PATH']}"}
        self(f"{sys.executable} -m venv {here / 'env'}")

    def __call__(self, commands: str, folder: Path | None = None) -> str:
        """Run lines of a shell, in the empty folder or another one, and return their output.

        Raises:
            StepError: one of them failed; with what it wrote.
        """
        done = run(
            ["bash", "-euxo", "pipefail", "-c", commands],
            cwd=folder or self.here,
            env=self.environment,
            stdout=PIPE,
            stderr=STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise StepError(f"{commands}\nended with {done.returncode}:\n{done.stdout[-4000:]}")
        return done.stdout


def pins(here: Path, transformers: str | None) -> Path:
    """A copy of the pinned versions, with a minor version of Transformers if one is named."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    if transformers:
        own = re.compile(r"^(transformers|huggingface[-_]hub|tokenizers)==.*\n", re.MULTILINE)
        text = own.sub("", text) + f"transformers=={transformers}.*\n"
    path = here / "constraints.txt"
    path.write_text(text, encoding="utf-8")
    return path


COMMANDS = {
    "plugins": "--check",
    "demo": "",
    "generate": "--model {model} --algorithm quest --backend triton_attention --prompt def",
    "eval": "--algorithms quest --tasks facts --contexts 1024 --questions 2 --budgets 5%",
}
"""Commands of topkv that a user meets first beside those of the README, with arguments."""


def walk(here: Path, transformers: str | None) -> None:
    """Walk through all steps, in an empty folder."""
    with step("make an environment"):
        shell = Shell(here, pins(here, transformers))
    with step("run the README's install, in the clone"):
        install = block("install").replace(CPU_INDEX, os.environ.get("TORCH_INDEX") or CPU_INDEX)
        shell(install, ROOT)
    (here / "example.py").write_text(block("model"), encoding="utf-8")
    with step("run the README's model"):
        show(shell("python example.py"))
    code = "import topkv_evaluation as e, transformers as t; print(t.__version__, e.CHECKPOINT)"
    version, model = shell(f'python -c "{code}"').splitlines()[-1].split()
    print(f"           | Transformers {version}")
    for name, arguments in COMMANDS.items():
        with step(f"topkv {name}"):
            show(shell(f"topkv {name} {arguments.format(model=model)}"))
    (here / "algorithm.py").write_text(block("method"), encoding="utf-8")
    with step("run the README's method of one's own through the kit"):
        show(shell(block("kit")))


def show(output: str) -> None:
    """Print the last line of an output."""
    print(f"           | {output.strip().splitlines()[-1]}")


def main(arguments: list[str]) -> int:
    transformers = arguments[0] if arguments else None
    with tempfile.TemporaryDirectory(prefix="topkv-newcomer-") as here:
        try:
            with step("in all"):
                walk(Path(here), transformers)
        except StepError as error:
            print(error)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
