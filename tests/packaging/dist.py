"""Build every package into ``dist/`` and check the results: ``make dist``.

Wheels are built from the sdists, so an sdist that lacks something shows.
"""

from __future__ import annotations

import shutil
import sys
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

from tests.packaging.packages import DIST, ROOT, Package, build, packages, run


def metadata_reasons(package: Package, found: Message) -> list[str]:
    """List what the metadata of a wheel lacks."""
    expected = {
        "Name": package.name,
        "Version": package.version,
        "Summary": package.project["description"],
        "License-Expression": "Apache-2.0",
        "License-File": "LICENSE",
        "Description-Content-Type": "text/markdown",
    }
    reasons = [
        f"its metadata must have {key}: {value}, got {found[key]!r}"
        for key, value in expected.items()
        if found[key] != value
    ]
    for key in ("Author", "Requires-Python", "Keywords", "Classifier"):
        if not found[key]:
            reasons.append(f"its metadata lacks {key}; add it to [project] of pyproject.toml")
    if f"# {package.name}" not in str(found.get_payload()):
        reasons.append("its description is not the README, which begins with the package's name")
    return reasons


def wheel_reasons(package: Package, wheel: Path) -> list[str]:
    """List what is wrong with a wheel."""
    info = f"{package.module}-{package.version}.dist-info"
    source = package.folder / "src"
    with ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.startswith(f"{info}/")}
        found = message_from_bytes(archive.read(f"{info}/METADATA"))
        licenses = [name for name in archive.namelist() if name == f"{info}/licenses/LICENSE"]
        texts = [archive.read(name) for name in licenses]
    reasons = metadata_reasons(package, found)
    if texts != [(ROOT / "LICENSE").read_bytes()]:
        reasons.append(
            "it must hold the LICENSE of this repository: see sdist.force-include of others"
        )
    there = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    for what, names in (("lacks", there - held), ("holds, beside its sources,", held - there)):
        if names:
            reasons.append(f"it {what} {', '.join(sorted(names))}")
    for name, target in package.points.items():
        if f"{target.replace('.', '/')}.py" not in held:
            reasons.append(f"entry point {name} leads to {target}, which it does not hold")
    return reasons


def main() -> int:
    shutil.rmtree(DIST, ignore_errors=True)
    failed = False
    for package in packages():
        sdist, wheel = build(package.folder, DIST)
        reasons = wheel_reasons(package, wheel)
        failed = failed or bool(reasons)
        sizes = " ".join(
            f"{path.name} {path.stat().st_size / 1024:.0f} KiB" for path in (sdist, wheel)
        )
        print(f"{'FAILED' if reasons else 'ok':6} {package.name} {package.version}: {sizes}")
        for reason in reasons:
            print(f"       - {reason}")
    built = sorted(DIST.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *built)
    print(f"twine check: {len(built)} files are clean")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
