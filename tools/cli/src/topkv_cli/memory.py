"""Host memory that this process may still take: of the system, and of each control group.

In a container the system's figure is that of its host, and whoever takes more than the group may
have is killed without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")

UNLIMITED = 2**60
"""Bytes from which on a limit counts as none: version 1 writes a number that no machine has."""


@frozen
class HostMemory:
    """Memory of this machine, and how much of it this process may take.

    Attributes:
        total: bytes of the system.
        available: bytes that can be taken before somebody is killed or pages are swapped.
        limit: bytes of the control group that decides about ``available``; None where the system
            itself does.
        whose: name of what decides, for messages.
    """

    total: int
    available: int
    limit: int | None = None
    whose: str = "of the system"


def host_memory(proc: Path = PROC, groups: Path = GROUPS) -> HostMemory:
    """Look memory up in the files of Linux.

    Args:
        proc, groups: where the system shows processes, and control groups of either version.
    """
    sizes = meminfo(proc / "meminfo")
    found = HostMemory(sizes["MemTotal"], sizes["MemAvailable"])
    for folder, limit, left in _limits(proc, groups):
        if left < found.available:
            found = HostMemory(found.total, left, limit, f"of the control group {folder}")
    return found


def meminfo(path: Path) -> dict[str, int]:
    """Read bytes by name from a meminfo file of the system or of a NUMA node."""
    sizes = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        number, *unit = rest.split()
        sizes[name.split()[-1]] = int(number) * (1024 if unit == ["kB"] else 1)
    return sizes


def _limits(proc: Path, groups: Path) -> Iterator[tuple[Path, int, int]]:
    """Yield the control groups of this process that have a limit, with it and what is left."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            root, names = groups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = groups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # A container may see its own group at the root, under the path that its host has for it.
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(root):
                yield from _limit(folder, *names)


def _limit(folder: Path, most: str, used: str, cached: str) -> Iterator[tuple[Path, int, int]]:
    """Yield the limit of a group, if any; page cache gives way before anybody is killed."""
    try:
        limit = int((folder / most).read_text())
        usage = int((folder / used).read_text())
        stat = (folder / "memory.stat").read_text()
    except (OSError, ValueError):  # not here, or "max"
        return
    pairs = (line.split() for line in stat.splitlines())
    reclaimed = next((int(count) for name, count in pairs if name == cached), 0)
    if limit < UNLIMITED:
        yield folder, limit, max(limit - usage + reclaimed, 0)
