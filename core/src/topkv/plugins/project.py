"""Packages of this project that may not be installed, as the core's own metadata names them.

They are what its extras install, so that no code of the core knows a package. A package is called
after what it offers: ``topkv-NAME``, or ``topkv-NAME-KIND``.
"""

from __future__ import annotations

import re
from importlib import metadata


def canonical(name: str) -> str:
    """The name of a distribution as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def packages() -> set[str]:
    """Canonical names; none where the core runs from its sources, which have no metadata."""
    try:
        lines = metadata.requires("topkv") or []
    except metadata.PackageNotFoundError:
        return set()
    return {canonical(re.split(r"[^\w.-]", line)[0]) for line in lines if "extra" in line}


def package_of(kind: str, name: str) -> str | None:
    """The package that by its name offers a plugin; None if there is none of this project."""
    known = packages()
    names = (canonical(f"topkv-{name}"), canonical(f"topkv-{name}-{kind}"))
    return next((each for each in names if each in known), None)
