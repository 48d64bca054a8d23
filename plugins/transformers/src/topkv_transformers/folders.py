"""Sessions in folders.

A folder holds a manifest, ``session``, and the parts that it names, each a safetensors file of at
most 128 MiB or a page. Parts are written first and the manifest takes its place in one move, so
that a folder always holds the session that it held before, or the new one. What is not as it was
written is refused by its checksum. The manifest is a line of version and checksum before JSON.
"""

from __future__ import annotations

import json
import os
import uuid
import zlib
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from attrs import frozen
from safetensors.torch import load, save
from torch import Tensor

from topkv.errors import CapabilityError
from topkv.storage.sessions import Rows

MANIFEST, HEAD = "session", "topkv session 1"


class SessionFolder:
    """The session of a folder, or the place of one.

    Args:
        path: of the folder, which is made when it is written.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)

    def __str__(self) -> str:
        return f"in {self.path}"

    def write(self, document: Mapping[str, Any], rows: Rows) -> None:
        """Write a session, in the place of the one that is there.

        Raises:
            OSError: it cannot be written; the folder is as it was, but for parts that belong to no
                session.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        old, name = self._parts(), uuid.uuid4().hex
        told = []
        for number, (request, blocks) in enumerate(rows):
            parts = [
                _write_part(self.path / f"{name}-{number}-{at}.safetensors", block)
                for at, block in enumerate(blocks)
            ]
            told.append({"request": request, "parts": parts})
        _sync(self.path)
        body = json.dumps({**document, "rows": told}).encode()
        _replace(self.path / MANIFEST, f"{HEAD} {zlib.crc32(body)}\n".encode() + body)
        _sync(self.path)
        for path in old:
            path.unlink(missing_ok=True)

    def read(self) -> FoundFolder:
        """The session; its blocks are read when they are asked for.

        Raises:
            CapabilityError: there is none, or its manifest is damaged.
        """
        try:
            head, _, body = (self.path / MANIFEST).read_bytes().partition(b"\n")
        except OSError as error:
            raise self.refused(f"{MANIFEST} cannot be read: {error}") from error
        if head != f"{HEAD} {zlib.crc32(body)}".encode():
            raise self.refused(f"{MANIFEST} is damaged, or not of the form {HEAD!r}")
        return FoundFolder(self, json.loads(body))

    def refused(self, *reasons: str) -> CapabilityError:
        return CapabilityError(f"the session {self} cannot be resumed", reasons)

    def _parts(self) -> list[Path]:
        """The files of the session that the folder holds, if it holds one."""
        try:
            rows = self.read().document["rows"]
        except CapabilityError:
            return []
        return [self.path / Path(part["file"]).name for row in rows for part in row["parts"]]


@frozen
class FoundFolder:
    """What a folder holds.

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
                data = path.read_bytes()
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
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"file": path.name, "bytes": len(data), "crc32": zlib.crc32(data)}


def _replace(path: Path, data: bytes) -> None:
    """Put a file in its place in one move."""
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _sync(folder: Path) -> None:
    """What stands in a folder outlives a loss of power."""
    place = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(place)
    finally:
        os.close(place)
