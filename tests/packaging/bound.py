"""Raise the bound of a package whose inside topkv touches, once its tests have passed.

    python -m tests.packaging.bound transformers 5.25.1

That release becomes the pin of constraints.txt, and the next minor one the bound of every
``pyproject.toml`` that has one; docs/versions.md is written anew. Commit it with what the release
needed.
"""

from __future__ import annotations

import re
import sys

from packaging.version import Version

from tests.packaging.packages import ROOT, packages


def raised(text: str, name: str, version: Version) -> str:
    """Return a ``pyproject.toml`` whose bound of a package is behind a version."""
    bound = f"{version.major}.{version.minor + 1}"
    return re.sub(rf'("{name}(?:>=[\d.]+,)?<)[\d.]+(")', rf"\g<1>{bound}\g<2>", text)


def main(name: str, version: str) -> None:
    pins = ROOT / "constraints.txt"
    text, count = re.subn(rf"(?m)^{name}==.*$", f"{name}=={version}", pins.read_text())
    if count != 1:
        raise SystemExit(f"constraints.txt must pin {name} once, and does {count} times")
    pins.write_text(text)
    changed = []
    for package in packages():
        path = package.folder / "pyproject.toml"
        before = path.read_text()
        path.write_text(raised(before, name, Version(version)))
        changed += [package.name] if path.read_text() != before else []
    from tests.versions_page import lines  # reads what was written

    (ROOT / "docs" / "versions.md").write_text("\n".join(lines()) + "\n")
    print(f"{name} {version}: pinned; bounds of {', '.join(changed) or 'no package'} changed")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
