"""Sessions in a storage, so that a request goes on in another process.

    with StoredSessions("files", {"path": "sessions"}) as stored:
        stored["request 17"].write({}, [(state.as_dict(), blocks)])  # of suspended.suspend

A session is cut into objects of at most ``PIECE`` bytes, each behind a header with checksums (see
``topkv_prefixes.objects``). A manifest, an object too, lists tensors and numbers; a head, which is
stored last and whose key follows from the name, leads to the manifest. So a head means that the
session is whole, unless the storage has lost something since, which is noticed before anything is
used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from struct import Struct
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from topkv.errors import ConfigError, StorageError
from topkv.messages import shown
from topkv.plugins import PluginRegistry
from topkv_prefixes.objects import HEADER, problem_of, write_header
from topkv_prefixes.opened import OpenedStorage
from topkv_prefixes.settings import is_text

PIECE = 8 << 20
"""Most bytes of an object, without its header."""

AT_ONCE = 4
"""Objects of a call."""

FORM = b"topkv session 1"
FINGERPRINT = hashlib.sha256(FORM).digest()
_HEAD = Struct("<Q16s")  # bytes of the manifest, and the id of its session

Rows = Iterable[tuple[Mapping[str, Any], Iterable[Mapping[str, Tensor]]]]
"""Requests of a session: the numbers of each, fit for JSON, and its tensors block by block."""

AGAIN = "process the prompt again"


class StoredSessions(OpenedStorage):
    """Sessions in a storage, by name. Any thread; close it at the end.

    Args:
        name, params: name and parameters of the plugin, as of the setting ``storage``.
        limit_s: seconds after which a call to the storage counts as hung.
        registry: where the plugin is found; what is installed by default.

    Raises:
        ConfigError: a parameter is wrong, or the plugin refuses it.
        PluginError: there is no such plugin.
    """

    def __init__(
        self,
        name: str,
        params: Mapping[str, Any] | None = None,
        limit_s: float = 30.0,
        registry: PluginRegistry | None = None,
    ) -> None:
        super().__init__(name, params, HEADER + PIECE, limit_s, registry)

    def __getitem__(self, name: str) -> StoredSession:
        """Return the session of a name, stored or not."""
        return StoredSession(self, name)


@frozen
class StoredSession:
    """A session of a storage.

    Attributes:
        sessions: all sessions of the storage.
        name: any text that is not empty.
    """

    sessions: StoredSessions
    name: str

    def __attrs_post_init__(self) -> None:
        if not is_text(self.name) or not self.name:
            reason = "its name must be a text that is not empty and that UTF-8 has"
            reason = f"{reason}, got {shown(self.name)}"
            raise ConfigError("there is no such session", [reason])

    def __str__(self) -> str:
        return f"{self.name!r} in {self.sessions}"

    def write(self, document: Mapping[str, Any], rows: Rows) -> None:
        """Store a session.

        Args:
            document: anything else that belongs to it, fit for JSON.
            rows: its requests; a block is let go of before the next is asked for.

        Raises:
            StorageError: there is one of this name, or the storage fails or has no room. What was
                stored until then is removed.
        """
        asking = _Asking(self.sessions, f"the session {self} cannot be stored", os.urandom(16))
        key = _key_of_name(self.name)
        taken = "there is one of this name; discard it, or take another name"
        if asking("exists", [key]):
            raise asking.error(taken)
        kept, named = list[bytes](), False
        try:
            reported = {**document, "rows": [asking.put_row(row, kept) for row in rows]}
            manifest = np.frombuffer(json.dumps(reported).encode(), dtype=np.uint8)
            asking.put([asking.key(0)], [[manifest]], kept)
            head = np.frombuffer(_HEAD.pack(len(manifest), asking.ident), dtype=np.uint8)
            named = True
            asking.put([key], [[head]], [])
            if self._head(asking) != (len(manifest), asking.ident):
                raise asking.error(taken)  # somebody was faster
        except BaseException as error:
            try:
                # Of two who take a name at once one has it: only this one's head goes.
                if named and self._is(asking):
                    asking("delete", [key])
                if kept:
                    asking("delete", kept)
            except StorageError as further:
                error.add_note(f"{len(kept)} objects of it may be left behind: {further}")
            raise

    def read(self) -> FoundSession:
        """Read the session; its blocks are read when they are asked for.

        Raises:
            StorageError: there is none, it is damaged, or the storage fails.
        """
        asking = _Asking(self.sessions, f"the session {self} cannot be resumed", b"")
        size, ident = self._head(asking)
        asking = evolve(asking, ident=ident)
        body = np.empty(size, dtype=np.uint8)
        asking.get([asking.key(0)], [[body]], "manifest")
        return FoundSession(asking, json.loads(body.tobytes()))

    def discard(self) -> None:
        """Remove the session, if there is one.

        Raises:
            StorageError: the storage fails.
        """
        asking = _Asking(self.sessions, f"the session {self} cannot be discarded", b"")
        key = _key_of_name(self.name)
        if not asking("exists", [key]):
            return
        try:
            found = self.read()
        except StorageError as error:
            # Nobody finds the objects that are left, which go when the storage makes room.
            asking("delete", [key])
            raise asking.error(
                f"its head is removed, and what it led to is lost: {error}"
            ) from error
        asking("delete", [key])
        asking("delete", [found.asking.key(number) for number in range(found.objects)])

    def _is(self, asking: _Asking) -> bool:
        """Return True if the head that is there leads to the session that is asked about."""
        try:
            return bool(self._head(asking)[1] == asking.ident)
        except StorageError:
            return False

    def _head(self, asking: _Asking) -> tuple[int, bytes]:
        body = np.empty(_HEAD.size, dtype=np.uint8)
        asking.get([_key_of_name(self.name)], [[body]], "head")
        size, ident = _HEAD.unpack(body.tobytes())
        return size, ident


@frozen
class FoundSession:
    """A session that was found in a storage.

    Attributes:
        asking: calls to the storage about it.
        document: the document that was written, and ``rows``: for each row its numbers
            (``request``) and its ``parts``, see ``_Asking.put_row``.
    """

    asking: _Asking
    document: dict[str, Any]

    @property
    def objects(self) -> int:
        """Number of objects beside the head."""
        parts: list[dict[str, int]] = [
            part for row in self.document["rows"] for part in row["parts"]
        ]
        return 1 + sum(part["objects"] for part in parts)

    def request(self, row: int) -> dict[str, Any]:
        """Return the numbers of a row."""
        return dict(self.document["rows"][row]["request"])

    def blocks(self, row: int) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors of a row, block by block.

        Raises:
            StorageError: objects are missing or damaged, or the storage fails.
        """
        for part in self.document["rows"][row]["parts"]:
            block = {
                name: torch.empty(shape, dtype=getattr(torch, dtype))
                for name, dtype, shape in part["tensors"]
            }
            pieces = _pieces(block)
            for at in range(0, len(pieces), AT_ONCE):
                first = part["first"] + at
                keys = [self.asking.key(first + n) for n in range(len(pieces[at : at + AT_ONCE]))]
                self.asking.get(keys, pieces[at : at + AT_ONCE], f"row {row}")
            yield block


@frozen
class _Asking:
    """Calls to the storage about one session.

    Attributes:
        sessions: makes the calls.
        head: first line of errors.
        ident: id of this session, which is in the keys of its objects.
    """

    sessions: StoredSessions
    head: str
    ident: bytes

    def __call__(self, hook: str, *arguments: Any) -> Any:
        return self.sessions.ask(self.head, hook, *arguments)

    def error(self, *reasons: str) -> StorageError:
        return StorageError(self.head, reasons)

    def key(self, number: int) -> bytes:
        """Return the key of an object by its number; the manifest is number 0."""
        return hashlib.sha256(FORM + self.ident + number.to_bytes(8, "big")).digest()

    def put_row(
        self, row: tuple[Mapping[str, Any], Iterable[Mapping[str, Tensor]]], kept: list[bytes]
    ) -> dict[str, Any]:
        """Store the blocks of a request, and return its entry of the manifest.

        Args:
            kept: gets the keys of all objects.
        """
        request, blocks = row
        parts = []
        for block in blocks:
            whole = {name: block[name].contiguous() for name in sorted(block)}
            pieces, first = _pieces(whole), len(kept) + 1
            for at in range(0, len(pieces), AT_ONCE):
                some = pieces[at : at + AT_ONCE]
                self.put([self.key(len(kept) + 1 + n) for n in range(len(some))], some, kept)
            reported = [
                (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
                for name, tensor in whole.items()
            ]
            parts.append({"tensors": reported, "first": first, "objects": len(pieces)})
        return {"request": dict(request), "parts": parts}

    def put(
        self, keys: Sequence[bytes], pieces: Sequence[list[np.ndarray]], kept: list[bytes]
    ) -> None:
        """Store objects, each of them or none."""
        headers = [np.empty(HEADER, dtype=np.uint8) for _ in keys]
        for header, key, body in zip(headers, keys, pieces, strict=True):
            write_header(header, key, FINGERPRINT, body)
        kept += keys
        places = [[header, *body] for header, body in zip(headers, pieces, strict=True)]
        done = list(self("put", list(keys), places))
        if done != [True] * len(keys):
            count = len(keys) - done.count(True)
            raise self.error(
                f"{self.sessions} took {len(keys) - count} of {len(keys)} objects, so it is full; "
                "make room in it, or raise its limit"
            )

    def get(self, keys: Sequence[bytes], pieces: Sequence[list[np.ndarray]], what: str) -> None:
        """Fill memory with the bytes of objects, all of them right."""
        headers = [np.empty(HEADER, dtype=np.uint8) for _ in keys]
        places = [[header, *body] for header, body in zip(headers, pieces, strict=True)]
        done = list(self("get", list(keys), places))
        reasons = []
        for number, (key, header, body) in enumerate(zip(keys, headers, pieces, strict=True)):
            there = number < len(done) and done[number]
            why = problem_of(header, body, key, FINGERPRINT) if there else "it is not there"
            if why:
                reasons.append(f"{what}, object {key.hex()[:16]}: {why}; {AGAIN}")
        if reasons:
            raise self.error(*reasons)


def _key_of_name(name: str) -> bytes:
    return hashlib.sha256(FORM + b" head " + name.encode()).digest()


def _pieces(block: Mapping[str, Tensor]) -> list[list[np.ndarray]]:
    """Cut the memory of contiguous tensors, one behind the other, into parts of objects."""
    pieces: list[list[np.ndarray]] = []
    room = 0
    for tensor in block.values():
        left = tensor.reshape(-1).view(torch.uint8).numpy()
        while len(left):
            if not room:
                pieces.append([])
                room = PIECE
            pieces[-1].append(left[:room])
            room, left = room - len(pieces[-1][-1]), left[room:]
    return pieces
