"""Versions of other packages that tests ran with: the ranges that packages of topkv declare.

The ranges are written once, in each ``pyproject.toml``, and read from the metadata of installed
packages. A range that pip is not to enforce stands in the extra ``tested`` of a package.
"""

from __future__ import annotations

import re
from importlib import metadata


def never_tested(package: str) -> list[str]:
    """List installed packages whose version the tests of ``package`` never ran with.

    Args:
        package: name of a distribution.

    Returns:
        A sentence for each; empty where a package is not installed, or sets no upper bound.
    """
    try:
        requires, own = metadata.requires(package) or [], metadata.version(package)
    except metadata.PackageNotFoundError:  # its sources are on the path, without metadata
        return []
    found = []
    for name, bounds in _ranges(requires).items():
        version = _installed(name)
        if version and not _within(version, bounds):
            ran = ",".join(f"{sign}{bound}" for sign, bound in bounds)
            found.append(
                f"{name} {version} was never tested with {package} {own}, whose tests ran with "
                f"{ran}"
            )
    return found


def _ranges(requires: list[str]) -> dict[str, list[tuple[str, str]]]:
    """Bounds by name, of all lines that name it; those without an upper bound are left out."""
    ranges: dict[str, list[tuple[str, str]]] = {}
    for line in requires:
        found = re.match(r"[\w.-]+", line)
        if found:
            bounds = re.findall(r"(>=|<)\s*([\d.]+)", line.partition(";")[0])
            ranges.setdefault(found.group(), []).extend(bounds)
    return {
        name: list(dict.fromkeys(bounds))
        for name, bounds in ranges.items()
        if any(sign == "<" for sign, _ in bounds)
    }


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _within(version: str, bounds: list[tuple[str, str]]) -> bool:
    at = _numbers(version)
    return all(
        at < _numbers(bound) if sign == "<" else at >= _numbers(bound) for sign, bound in bounds
    )


def _numbers(version: str) -> list[int]:
    """Numbers of the release alone: 2.13.0+cpu and 2.13.0rc1 are 2.13, as is 2.13.0."""
    release = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(each) for each in release.group().split(".")] if release else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers
