"""Version of SGLang that is installed, and whether this package was tested with it."""

from __future__ import annotations

from importlib import metadata

TESTED = {"cpu": ("0.5.23",), "cuda": ("0.5.23",)}
"""Versions of SGLang that the tests of this package have run with, by the device. Each moves
places, so a version counts whole."""


def installed() -> str | None:
    """Installed version of SGLang; None where there is none."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def version_reasons(version: str, device: str) -> list[str]:
    """Reasons against a version of SGLang: parts that this package uses move in each of them.

    Args:
        version: of SGLang.
        device: what it runs on; another one than the tested is refused elsewhere.
    """
    tested = TESTED.get(device, ())
    if not tested or version in tested:
        return []
    return [
        f"SGLang {version} is not among the versions that were tested on {device}, "
        f"{', '.join(tested)}"
    ]


def missing() -> list[str]:
    """Reasons why no server of SGLang can be started here."""
    version = installed()
    if version is None:
        return [f"sglang: not installed; install sglang=={TESTED['cpu'][-1]}"]
    return version_reasons(version, "cpu")


def doctor() -> list[str]:
    """Lines for ``topkv doctor``."""
    reasons = missing()
    if installed() is None:
        return reasons
    return [f"sglang: {'; '.join(reasons) or f'ok, {installed()}'}"]
