"""The newest release of everything that packages need, whatever bounds say: ``make newest``.

    make newest                       install, and run the tests that look into other packages
    make newest ARGS=core/tests/test_config.py

Wheels of ``make dist`` get an environment of their own, build/newest, with the newest releases of
what they declare. pip resolves without upper bounds, constraints or the machine's configuration,
so that torch is a CUDA build of gigabytes. What was pinned and what came stand first in the
output, what fails stands last. ``python -m tests.packaging.bound`` raises a bound.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.packaging.environment import declared
from tests.packaging.packages import DIST, ROOT, packages, run

FOLDER = ROOT / "build" / "newest"
SET = ("topkv", "topkv-cli", "topkv-evaluation", "topkv-transformers", "topkv-quest")
SET += ("topkv-triton-attention", "topkv-snapkv", "topkv-clusterkv", "topkv-double-sparsity")
SET += ("topkv-pariskv", "topkv-pqcache", "topkv-rocketkv", "topkv-streaming-llm")
SET += ("topkv-triton-topk", "topkv-trained-gate", "topkv-deepseek-dsa", "topkv-files")
SET += ("topkv-keydiff", "topkv-prediction", "topkv-prefixes", "topkv-testing", "topkv-authoring")
SET += ("topkv-dropping",)
TESTS = ("plugins/transformers/tests", "tests/test_kernels.py")
KEPT = ("PATH", "HOME", "SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE")
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "matplotlib")


def needed() -> list[str]:
    """Names of third-party packages that the wheels of the set declare, without bounds."""
    wheels = [DIST / each.wheel for each in packages() if each.name in SET]
    lines = [line for wheel in wheels for line in declared(wheel, ["testing", "triton"])]
    return sorted({line.name for line in lines if not line.name.startswith("topkv")})


def clean() -> dict[str, str]:
    """Variables of a process without this machine's pip configuration, but for certificates,
    without which some networks let nothing through."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    return {**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def install() -> Path:
    """Make the environment anew, and return its interpreter."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    run(sys.executable, "-m", "venv", FOLDER)
    python = FOLDER / "bin" / "python"
    wheels = [DIST / each.wheel for each in packages() if each.name in SET]
    for what in ([*needed(), *TOOLS], ["--no-deps", "--no-index", *wheels]):
        command = [python, "-m", "pip", "install", "--quiet", *map(str, what)]
        subprocess.run(command, env=clean(), check=True)
    return python


def versions(python: Path) -> list[str]:
    """Versions that came, beside those that constraints.txt pins."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    listed = run(python, "-m", "pip", "list", "--format=freeze").split()
    came = dict(line.partition("==")[::2] for line in listed)
    names = [name for name in needed() if came.get(name) != pins.get(name)]
    return [f"{name}: pinned {pins.get(name, 'nowhere')}, newest {came[name]}" for name in names]


def main(arguments: list[str]) -> int:
    python = install()
    print("\n".join(versions(python)) or "everything that is pinned is the newest", flush=True)
    tests = arguments or [*TESTS]
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "-m",
        "not gpu and not slow and not nightly",
    ]
    variables = {**clean(), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *tests], cwd=ROOT, env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
