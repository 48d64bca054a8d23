"""Versions of other packages that tests ran with: the ranges that packages of topkv declare.

The ranges are written once, in each ``pyproject.toml``, and read from the metadata of installed
packages. A range that pip is not to enforce stands in the extra ``tested`` of a package.
"""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version


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
    ranges: dict[str, SpecifierSet] = {}
    for line in map(Requirement, requires):  # several may name one package
        ranges[line.name] = ranges.get(line.name, SpecifierSet()) & line.specifier
    found = []
    for name, bounds in ranges.items():
        version = _installed(name) if any(each.operator == "<" for each in bounds) else None
        if version and not _within(version, bounds):
            found.append(
                f"{name} {version} was never tested with {package} {own}, whose tests ran with "
                f"{bounds}"
            )
    return found


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _within(version: str, bounds: SpecifierSet) -> bool:
    """Compare the release alone: 2.13.0+cpu and 2.13.0rc1 are 2.13. What pip would not take for a
    version is in no range."""
    try:
        return Version(version).base_version in bounds
    except InvalidVersion:
        return False
