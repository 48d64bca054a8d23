"""Sessions in folders.

A folder holds a manifest, ``session``, and the parts that it names, each a safetensors file of at
most 128 MiB or a page. Parts are written first and the manifest takes its place in one move, so
that a folder always holds the session that it held before, or the new one. What is not as it was
written is refused by its checksum. The manifest is a line of version and checksum before JSON.

While a session is written, a note beside it says so. Whoever has written it, or finds it later
without a writer, removes what neither session needs: parts of the old one, or of the one that was
cut short.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import uuid
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

from attrs import frozen
from safetensors.torch import load, save
from torch import Tensor

from topkv.errors import CapabilityError, ConfigError, StorageError
from topkv.messages import shown
from topkv_prefixes.stored import Rows

MANIFEST, HEAD = "session", "topkv session 1"
FORM = b"topkv session "
"""The first bytes of manifests and notes of all versions."""

NOTE = ".unfinished"
LEFT = re.compile(r"[0-9a-f]{32}\.unfinished")
PART = re.compile(r"[0-9a-f]{32}-\d+-\d+\.safetensors")


class SessionFolder:
    """The session of a folder, or the place of one.

    Args:
        path: of the folder, which is made when it is written.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        try:
            name = os.fspath(path)
            if not name or b"\0" in os.fsencode(name):
                raise ValueError
        except (TypeError, ValueError) as error:  # names that UTF-8 lacks are ValueErrors
            reason = "it must be the path of a folder, or a session of StoredSessions"
            raise ConfigError(
                "there is no such session", [f"{reason}, got {shown(path)}"]
            ) from error
        self.path = Path(os.fsdecode(name))

    def __str__(self) -> str:
        return f"in {self.path}"

    def write(self, document: Mapping[str, Any], rows: Rows) -> None:
        """Write a session, in the place of the one that is there.

        Raises:
            StorageError: a file of the manifest's name is no manifest. It stays.
            OSError: it cannot be written; the folder is as it was.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._check()
        for note in self.path.glob(f"*{NOTE}"):
            self._settle_left(note)
        name = uuid.uuid4().hex
        with self._noted(name) as note:
            reported = []
            for number, (request, blocks) in enumerate(rows):
                parts = [
                    _write_part(self.path / f"{name}-{number}-{at}.safetensors", block)
                    for at, block in enumerate(blocks)
                ]
                reported.append({"request": request, "parts": parts})
            _sync(self.path)
            body = json.dumps({**document, "rows": reported}).encode()
            new = self.path / f"{name}.{MANIFEST}"
            _write_file(new, f"{HEAD} {zlib.crc32(body)}\n".encode() + body)
            self._check()
            note.write(json.dumps(self._parts()).encode())
            note.flush()
            new.replace(self.path / MANIFEST)
            _sync(self.path)

    def _check(self) -> None:
        """Raise StorageError where a file has the name of the manifest and is none."""
        path = self.path / MANIFEST
        if os.path.lexists(path) and not _begins(path):
            reason = f"{str(path)!r} is not of topkv, and stays; take another folder"
            raise StorageError(f"the session {self} cannot be written", [reason])

    @contextmanager
    def _noted(self, name: str) -> Iterator[BinaryIO]:
        """Note that a session is being written, and settle at the end, whatever that is.

        Args:
            name: of all its files.

        Yields:
            The note, for the names of parts that go when the new manifest has its place.
        """
        path = self.path / f"{name}{NOTE}"
        with path.open("xb") as file:
            try:
                _is_alone(file)
                file.write(FORM + b"\n")
                file.flush()
                yield file
            except BaseException as error:
                try:
                    self._settle(path)
                except OSError as further:
                    error.add_note(f"parts of it may be left behind: {further}")
                raise
            else:
                self._settle(path)

    def _settle_left(self, note: Path) -> None:
        """Settle the leftovers of a writer that is gone."""
        if LEFT.fullmatch(note.name) and note.is_file():
            with suppress(FileNotFoundError), note.open("rb") as file:  # or somebody else does
                if FORM.startswith(file.read(len(FORM))) and _is_alone(file):
                    self._settle(note)

    def _settle(self, note: Path) -> None:
        """Remove the parts that a note names or its writer has written, but for those of the
        session that the folder holds now; then the note."""
        needed, name = self._parts(), note.name.removesuffix(NOTE)
        own = [path.name for path in self.path.glob(f"{name}-*.safetensors")]
        try:
            listed = json.loads(note.read_bytes().partition(b"\n")[2])
        except (ValueError, FileNotFoundError):  # the writer had not come so far
            listed = []
        for part in {*listed, *own} - {*needed}:
            if PART.fullmatch(part):
                (self.path / part).unlink(missing_ok=True)
        (self.path / f"{name}.{MANIFEST}").unlink(missing_ok=True)
        note.unlink(missing_ok=True)

    def read(self) -> FoundFolder:
        """The session; its blocks are read when they are asked for.

        Raises:
            CapabilityError: there is none, or its manifest is damaged.
        """
        try:
            head, _, body = _read(self.path / MANIFEST).partition(b"\n")
        except OSError as error:
            raise self.refused(f"{MANIFEST} cannot be read: {error}") from error
        if head != f"{HEAD} {zlib.crc32(body)}".encode():
            raise self.refused(f"{MANIFEST} is damaged, or not of the form {HEAD!r}")
        return FoundFolder(self, json.loads(body))

    def refused(self, *reasons: str) -> CapabilityError:
        return CapabilityError(f"the session {self} cannot be resumed", reasons)

    def _parts(self) -> list[str]:
        """The files of the session that the folder holds, if it holds one.

        Raises:
            OSError: nobody knows, for the manifest is there and cannot be read.
        """
        try:
            rows = self.read().document["rows"]
        except CapabilityError as error:
            if isinstance(error.__cause__, OSError) and (self.path / MANIFEST).exists():
                raise error.__cause__ from error
            return []
        return [Path(part["file"]).name for row in rows for part in row["parts"]]


@frozen
class FoundFolder:
    """The session that a folder holds.

    Attributes:
        folder: the folder.
        document: what was given, and ``rows``: of each its numbers, ``request``, and ``parts``.
    """

    folder: SessionFolder
    document: dict[str, Any]

    def request(self, row: int) -> dict[str, Any]:
        """The numbers of a row."""
        return dict(self.document["rows"][row]["request"])

    def blocks(self, row: int) -> Iterator[dict[str, Tensor]]:
        """The tensors of a row, block by block.

        Raises:
            CapabilityError: a part is missing or damaged.
        """
        for part in self.document["rows"][row]["parts"]:
            path = self.folder.path / Path(part["file"]).name  # no way out of the folder
            try:
                data = _read(path)
            except OSError as error:
                raise self.folder.refused(f"{path.name} cannot be read: {error}") from error
            if (len(data), zlib.crc32(data)) != (part["bytes"], part["crc32"]):
                raise self.folder.refused(
                    f"{path.name} is damaged: {len(data)} bytes of checksum {zlib.crc32(data)}, "
                    f"expected {part['bytes']} of {part['crc32']}"
                )
            yield load(data)


def _write_part(path: Path, block: Mapping[str, Tensor]) -> dict[str, Any]:
    data = save({name: tensor.contiguous() for name, tensor in block.items()})
    _write_file(path, data)
    return {"file": path.name, "bytes": len(data), "crc32": zlib.crc32(data)}


def _write_file(path: Path, data: bytes) -> None:
    """Write a file that is not there yet."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> bytes:
    """A file, and no pipe or device, which may have no end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return path.read_bytes()


def _begins(path: Path) -> bool:
    """True for a file that begins as those of topkv do."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(FORM)) == FORM


def _is_alone(file: BinaryIO) -> bool:
    """Lock a file until it is closed; False where another process has, or locks do not work."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sync(folder: Path) -> None:
    """Have the entries of a folder on the disk, so that they outlive a loss of power."""
    place = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(place)
    finally:
        os.close(place)
