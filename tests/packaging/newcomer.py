"""The path of somebody new, timed: install from wheels, use every command, start a plugin.

    make newcomer
    make newcomer ARGS=5.17          with this minor version of Transformers

Wheels are built from sdists. Everything else happens in an empty directory, with a fresh
environment that pip fills from its index; of the checkout only the wheels, the pinned versions and
the blocks of the README are used. Exits with 1 at the first step that fails.
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
from tests.packaging.packages import ROOT, build

PACKAGES = (
    "core",
    "plugins/quest",
    "plugins/triton_attention",
    "plugins/transformers",
    "tools/cli",
    "tools/authoring",
    "tools/dropping",
    "tools/prediction",
    "tools/prefixes",
    "tools/evaluation",
    "tools/testing",
)


class StepError(Exception):
    """A step failed; with what it wrote."""


@contextmanager
def step(what: str) -> Iterator[None]:
    """Print how long a step took."""
    start = time.monotonic()
    yield
    print(f"{time.monotonic() - start:7.1f} s  {what}", flush=True)


def call(folder: Path, *command: object) -> str:
    """Run a command in a folder and return its output; nothing of the checkout is on its path.

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


def blocks() -> tuple[str, str]:
    """The Python of the README: the use of a model, and the tests of a plugin."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    use, suite = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return use, suite


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
    "doctor": "--json",
    "plugins": "--check",
    "demo": "",
    "generate": "--model {model} --algorithm quest --backend triton_attention --prompt def",
    "eval": "--algorithms quest --tasks facts --contexts 1024 --questions 2 --budgets 5%",
}
"""Each command of topkv that a user meets first, with arguments."""


def walk(here: Path, transformers: str | None) -> None:
    """Walk through all steps, in an empty folder."""
    wheels = here / "wheels"
    with step("(we) build the wheels"):
        core, *others = [build(ROOT / name, wheels)[1] for name in PACKAGES]
    python = here / "env" / "bin" / "python"
    pip = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    pinned = ("-c", pins(here, transformers))
    with step("make an environment, and install torch"):
        call(here, sys.executable, "-m", "venv", here / "env")
        call(here, *pip, *pinned, "torch")
    with step("install topkv, quest, triton_attention, transformers, and the tools they need"):
        call(here, *pip, *pinned, f"{core}[cli,testing]", *others)
    use, suite = blocks()
    (here / "example.py").write_text(use, encoding="utf-8")
    with step("run the README's example"):
        told = call(here, python, "example.py")
    print("".join(f"           | {line}\n" for line in told.splitlines()[-3:]), end="")
    code = "import topkv_evaluation as e, transformers as t; print(t.__version__, e.CHECKPOINT)"
    version, model = call(here, python, "-c", code).split()
    print(f"           | Transformers {version}")
    for name, arguments in COMMANDS.items():
        with step(f"topkv {name}"):
            told = call(
                here, python, "-m", "topkv_cli", name, *arguments.format(model=model).split()
            )
        print(f"           | {told.strip().splitlines()[-1]}")
    (here / "test_mine.py").write_text(suite.replace('"mine"', '"quest"'), encoding="utf-8")
    with step("pass the README's tests, of Quest"):
        told = call(here, python, "-m", "pytest", "-q", "test_mine.py")
    print(f"           | {told.splitlines()[-1]}")
    with step("topkv new first-try --kind algorithm"):
        call(here, python, "-m", "topkv_cli", "new", "first-try", "--kind", "algorithm")
    with step("install it"):
        call(here, *pip, *pinned, "-e", "./topkv-first-try")
    with step("pass its kit"):
        told = call(here / "topkv-first-try", python, "-m", "pytest", "-q")
    print(f"           | {told.splitlines()[-1]}")


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
