"""A directory of objects: names, atomic writes, leftovers of writers that died, and eviction.

``yz/abc...yz`` holds the object of the key ``abc...yz`` in hexadecimal. A file is written under
another name in ``new``, synchronized, and takes its name in one move, so that a name always stands
for a whole object. Its writer holds a lock on it meanwhile; a file in ``new`` without a lock is
what a dead writer has left.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from attrs import frozen

from topkv_files.bounds import Bound

NEW, LOCK = "new", "lock"
MOST_PARTS = min(os.sysconf("SC_IOV_MAX"), 1024)
"""Of one call to the system."""

REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.ENOENT)
"""The disk is full, or somebody has removed the new file."""


@frozen
class Held:
    """An object in a directory.

    Attributes:
        key: under which it is stored.
        path: its file.
        size: in bytes.
        used: nanoseconds of the clock when it was written or read last.
    """

    key: bytes
    path: str
    size: int
    used: int


class Folder:
    """Objects in a directory.

    Args:
        path: of the directory, which is made if it is not there.
        sync: have what is written on the disk before it takes its name.

    Raises:
        OSError: it can neither be made nor used.
    """

    def __init__(self, path: str | os.PathLike[str], sync: bool = True) -> None:
        self.path, self.sync = Path(path), sync
        self.path.joinpath(NEW).mkdir(parents=True, exist_ok=True)

    def path_of(self, key: bytes) -> str:
        """The file of a key."""
        name = key.hex()
        return f"{self.path}/{name[-2:]}/{name}"  # keys of one owner begin alike

    def has(self, key: bytes) -> bool:
        """Whether there is an object now."""
        return os.path.exists(self.path_of(key))

    def read(self, key: bytes, place: Sequence[np.ndarray]) -> bool:
        """Fill a place with an object of exactly its bytes; False if there is none."""
        size = sum(len(part) for part in place)
        try:
            file = os.open(self.path_of(key), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            if os.fstat(file).st_size != size:
                return False
            for parts, count in _calls(place):
                if os.readv(file, parts) != count:
                    return self._read_slowly(file, place)
            return True
        finally:
            os.close(file)

    @staticmethod
    def _read_slowly(file: int, place: Sequence[np.ndarray]) -> bool:
        """After a call that brought less than it was asked for."""
        at = 0
        for part in place:
            left = memoryview(part)
            while left:
                count = os.preadv(file, [left], at)
                if count == 0:
                    return False  # somebody has cut it
                at, left = at + count, left[count:]
        return True

    def write(self, key: bytes, place: Sequence[np.ndarray]) -> bool:
        """Store an object, unless its key is taken. False if there is no room."""
        path = self.path_of(key)
        if os.path.exists(path):
            return True
        new = f"{self.path}/{NEW}/{uuid.uuid4().hex}"
        try:
            self._write_new(new, path, place)
        except BaseException as error:
            with suppress(FileNotFoundError):
                os.unlink(new)
            if isinstance(error, OSError) and error.errno in REFUSED:
                return False
            raise
        return True

    def _write_new(self, new: str, path: str, place: Sequence[np.ndarray]) -> None:
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            for parts, count in _calls(place):
                _write_all(file, parts, count)
            if self.sync:
                os.fsync(file)
            self._name(new, path)
        finally:
            os.close(file)

    @staticmethod
    def _name(new: str, path: str) -> None:
        try:
            os.rename(new, path)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.rename(new, path)

    def remove(self, key: bytes) -> None:
        """Let an object go, if there is one."""
        with suppress(FileNotFoundError):
            os.unlink(self.path_of(key))

    def touch(self, keys: Sequence[bytes]) -> None:
        """These were used just now, the first one last: a page is found by those before it."""
        for key in reversed(keys):
            now = time.time_ns()  # the system's own stamps are alike for milliseconds
            with suppress(FileNotFoundError):
                os.utime(self.path_of(key), ns=(now, now))

    def held(self) -> Iterator[Held]:
        """Every object, in no order. Others may write and remove meanwhile."""
        for shelf in os.scandir(self.path):
            if len(shelf.name) == 2 and shelf.is_dir(follow_symlinks=False):
                for file in os.scandir(shelf.path):
                    with suppress(FileNotFoundError, ValueError):
                        found = file.stat(follow_symlinks=False)
                        key = bytes.fromhex(file.name)
                        yield Held(key, file.path, found.st_size, found.st_mtime_ns)

    def clean(self) -> int:
        """Remove what dead writers have left, and return how many files that was."""
        count = 0
        for left in os.scandir(self.path / NEW):
            with suppress(FileNotFoundError, BlockingIOError):
                file = os.open(left.path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(left.path)
                    count += 1
                finally:
                    os.close(file)
        return count

    def shrink(self, bounds: Sequence[Bound], wait: bool = True) -> None:
        """Where there is more than a bound allows, remove what went unused longest, down to its
        ``low``. The newest object stays if it is within the limit.

        One process at a time does it.

        Args:
            bounds: that are to hold; each is told what is left.
            wait: for another process that does it now; else this one leaves it to that.
        """
        with self._alone(wait) as mine:
            held, gone = sorted(self.held(), key=lambda each: each.used), set[bytes]()
            for bound in bounds:
                own = [
                    each
                    for each in held
                    if each.key.startswith(bound.owner) and each.key not in gone
                ]
                bound.used = sum(each.size for each in own)
                over = mine and bound.used > bound.limit
                for each in own if over else ():
                    if bound.used <= (bound.limit if each is own[-1] else bound.low):
                        break
                    with suppress(FileNotFoundError):
                        os.unlink(each.path)
                    bound.used -= each.size
                    gone.add(each.key)

    @contextmanager
    def _alone(self, wait: bool) -> Iterator[bool]:
        """Whether no other process shrinks the directory now."""
        file = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine = True
            except BlockingIOError:
                mine = False
            yield mine
        finally:
            os.close(file)


def _calls(place: Sequence[np.ndarray]) -> Iterator[tuple[list[memoryview], int]]:
    """Parts of a place for one call to the system each, and their bytes."""
    for at in range(0, len(place), MOST_PARTS):
        parts = [memoryview(part) for part in place[at : at + MOST_PARTS]]
        yield parts, sum(part.nbytes for part in parts)


def _write_all(file: int, parts: list[memoryview], count: int) -> None:
    done = os.writev(file, parts)
    while done < count:  # a signal or a nearly full disk cut it short
        whole = memoryview(b"".join(parts))[done:]
        done += os.write(file, whole)
