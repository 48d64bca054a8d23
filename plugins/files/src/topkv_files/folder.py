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
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from attrs import frozen

from topkv_files import owned
from topkv_files.bounds import Bound
from topkv_files.owned import LOCK, NEW, PRIVATE_FILE

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
    """Objects in a directory, which is the storage's own, see ``owned``.

    Args:
        path: of the directory.
        sync: have what is written on the disk before it takes its name.
    """

    def __init__(self, path: str | os.PathLike[str], sync: bool = True) -> None:
        self.path, self.sync = Path(path), sync

    def path_of(self, key: bytes) -> str:
        """The file of a key."""
        name = key.hex()
        return f"{self.path}/{name[-2:]}/{name}"  # keys of one owner begin alike

    def has(self, key: bytes) -> bool:
        """Return True if the key has an object now."""
        return owned.is_file(self.path_of(key))

    def blocked(self, key: bytes) -> bool:
        """Return True if something else than a file has the name of the key's file, or something
        else than a directory the name of its shelf."""
        path = self.path_of(key)
        return owned.is_other(os.path.dirname(path), stat.S_ISDIR) or owned.is_other(path)

    def read(self, key: bytes, place: Sequence[np.ndarray]) -> bool:
        """Fill a place with an object of exactly its bytes; False if there is none."""
        size = sum(len(part) for part in place)
        try:
            found = owned.open_file(self.path_of(key))
        except FileNotFoundError:
            return False
        with open(found, "rb") as file:
            # Of a file that somebody cuts meanwhile, a part comes short.
            return os.fstat(file.fileno()).st_size == size and all(
                file.readinto(part) == len(part) for part in place
            )

    def write(self, key: bytes, place: Sequence[np.ndarray]) -> bool:
        """Store an object, unless its key is taken. False if there is no room."""
        path = self.path_of(key)
        if owned.is_file(path):
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
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(new, flags, PRIVATE_FILE), "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.writelines(part.data for part in place)
            file.flush()
            if self.sync:
                os.fsync(file)
            self._name(new, path)

    @staticmethod
    def _name(new: str, path: str) -> None:
        try:
            os.rename(new, path)
        except FileNotFoundError:
            owned.make_directory(os.path.dirname(path))
            os.rename(new, path)

    def remove(self, key: bytes) -> None:
        """Let an object go, if there is one."""
        path = self.path_of(key)
        with suppress(FileNotFoundError):
            if owned.is_file(path):
                os.unlink(path)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark keys as used just now, the first one last: a page is found by those before it."""
        for key in reversed(keys):
            now = time.time_ns()  # the system's own stamps are alike for milliseconds
            with suppress(FileNotFoundError):
                os.utime(self.path_of(key), ns=(now, now), follow_symlinks=False)

    def held(self) -> Iterator[Held]:
        """Every object, in no order. Others may write and remove meanwhile."""
        for file in owned.pages_in(self.path):
            with suppress(FileNotFoundError):
                found = file.stat(follow_symlinks=False)
                key = bytes.fromhex(file.name)
                yield Held(key, file.path, found.st_size, found.st_mtime_ns)

    def let_go(self, held: Held) -> bool:
        """Remove an object that was found in the directory; return True if it is gone now. A file
        that is no page, or is another user's, has come from elsewhere, and stays."""
        try:
            if not owned.is_page(held.path):
                return False
            os.unlink(held.path)
        except FileNotFoundError:
            return True
        except PermissionError:
            return False
        return True

    def clean(self) -> int:
        """Remove what dead writers have left, and return how many files that was."""
        count = 0
        with suppress(FileNotFoundError), os.scandir(self.path / NEW) as entries:
            for left in entries:
                if owned.UNFINISHED.fullmatch(left.name):
                    with suppress(FileNotFoundError, BlockingIOError, PermissionError):
                        count += self._clean(left.path)
        return count

    @staticmethod
    def _clean(left: str) -> bool:
        file = owned.open_file(left)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not owned.is_page(left):
                return False
            os.unlink(left)
            return True
        finally:
            os.close(file)

    def shrink(self, bounds: Sequence[Bound], wait: bool = True) -> None:
        """Remove objects that went unused longest where there is more than a bound allows, down to
        its ``low``. The newest object stays if it is within the limit.

        One process at a time removes.

        Args:
            bounds: that are to hold; each gets to know what is left.
            wait: for another process that removes now; else this one leaves it to that one.
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
                    self.let_go(each)  # what stays is not counted either
                    bound.used -= each.size
                    gone.add(each.key)

    @contextmanager
    def _alone(self, wait: bool) -> Iterator[bool]:
        """Lock the directory for shrinking; yield True if no other process shrinks it now."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(self.path / LOCK, flags, PRIVATE_FILE)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine = True
            except BlockingIOError:
                mine = False
            yield mine
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a child of a fork may have the file open, too
            os.close(file)
