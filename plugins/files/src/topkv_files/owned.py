"""Ownership of directories and files: what the storage has not made is left alone.

A directory that the storage has made, or found empty, has a marker. Nothing is written to or
removed from another one, except those of earlier versions, which are known by what they hold. In
its own directory the storage counts regular files whose names are keys, and removes those of them
that begin as a page does.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from topkv_prefixes.objects import MAGIC

MARKER, NEW, LOCK = "topkv-files", "new", "lock"
TEXT = (
    b"The storage plugin files of topkv keeps pages here, and leaves alone what it has not made.\n"
)
PRIVATE_DIRECTORY, PRIVATE_FILE = 0o700, 0o600

NEEDED = {
    MARKER: ("file", stat.S_ISREG),
    LOCK: ("file", stat.S_ISREG),
    NEW: ("directory", stat.S_ISDIR),
}
SHELF = re.compile(r"[0-9a-f]{2}")
KEY = re.compile(r"[0-9a-f]{64}")
UNFINISHED = re.compile(r"[0-9a-f]{32}")

SHOWN = 3
"""Names in an error, at most."""


class ForeignError(Exception):
    """A directory holds what the storage has not made."""


def make_directory(path: str | os.PathLike[str]) -> None:
    """Make a directory that only this user can look into, unless there is one."""
    try:
        os.mkdir(path, PRIVATE_DIRECTORY)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def _mode(path: str) -> int | None:
    """The mode of what has a name, links not followed; None if nothing has."""
    try:
        return os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def is_file(path: str) -> bool:
    """True for a regular file of this name: no link, pipe, socket, device, directory."""
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def is_other(path: str, kind: Callable[[int], bool] = stat.S_ISREG) -> bool:
    """True if a name is taken by something of another kind."""
    mode = _mode(path)
    return mode is not None and not kind(mode)


def open_file(path: str) -> int:
    """Open a regular file to read it, and wait for nothing else.

    Raises:
        FileNotFoundError: there is none.
    """
    if not is_file(path):
        raise FileNotFoundError(f"no regular file: {path!r}")
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def is_page(path: str) -> bool:
    """True if a regular file begins as a page does. One that was cut may end before.

    Raises:
        FileNotFoundError: there is none.
    """
    file = open_file(path)
    try:
        return MAGIC.startswith(os.read(file, len(MAGIC)))
    finally:
        os.close(file)


def claim(path: Path) -> None:
    """Make a directory the storage's own.

    Raises:
        ForeignError: it holds what the storage has not made; nothing has changed.
        OSError: it can neither be made nor used.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    make_directory(path)
    check(path)
    with suppress(FileExistsError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = os.open(path / MARKER, flags, PRIVATE_FILE)
        try:
            os.write(file, TEXT)
        finally:
            os.close(file)
    make_directory(path / NEW)


def check(path: Path) -> None:
    """Raise ForeignError where a directory holds what the storage has not made, and has no marker;
    or where something else has a name that the storage needs. Changes nothing."""
    taken = [
        f"{path / name} must be a {what}"
        for name, (what, kind) in NEEDED.items()
        if is_other(f"{path}/{name}", kind)
    ]
    if taken:
        raise ForeignError(f"{'; '.join(taken)}: remove that, or name another directory")
    with os.scandir(path) as entries:
        found = list(entries)
    if any(entry.name == MARKER for entry in found):
        return
    others = list(islice(_others(found), SHOWN + 1))
    if others:
        more = ", and more" if len(others) > SHOWN else ""
        raise ForeignError(
            f"it holds what this storage has not made: {', '.join(others[:SHOWN])}{more}; name an "
            "empty directory or a new one, or make a file of the name "
            f"{str(path / MARKER)!r} if pages are to be kept beside that, which stays"
        )


def _others(entries: list[os.DirEntry[str]]) -> Iterator[str]:
    """Paths that no version of the storage has made."""
    for entry in entries:
        shelf = SHELF.fullmatch(entry.name)
        if entry.name == LOCK and entry.stat(follow_symlinks=False).st_size == 0:
            continue
        if not entry.is_dir(follow_symlinks=False) or not (shelf or entry.name == NEW):
            yield entry.path
            continue
        name = UNFINISHED if entry.name == NEW else KEY
        with os.scandir(entry.path) as files:
            for file in files:
                right = name.fullmatch(file.name) and (not shelf or _on(entry.name, file.name))
                with suppress(FileNotFoundError):  # removed meanwhile
                    if not right or not is_file(file.path) or not is_page(file.path):
                        yield file.path


def _on(shelf: str, name: str) -> bool:
    return KEY.fullmatch(name) is not None and name.endswith(shelf)


def pages_in(path: Path) -> Iterator[os.DirEntry[str]]:
    """Regular files under the names of keys, in no order. Others may remove them meanwhile."""
    with os.scandir(path) as entries:
        shelves = [
            entry
            for entry in entries
            if SHELF.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]
    for shelf in shelves:
        gone = suppress(FileNotFoundError, PermissionError)  # or somebody else's
        with gone, os.scandir(shelf.path) as files:
            for file in files:
                if _on(shelf.name, file.name) and file.is_file(follow_symlinks=False):
                    yield file
