"""Caches in folders: a conversation that goes on in another process, without reading its prompt.

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

import numpy as np
from safetensors.torch import load, save
from torch import Tensor, nn

from topkv import sessions
from topkv.errors import CapabilityError, RequestError
from topkv_transformers.cache import TopkvCache
from topkv_transformers.modules import digest_of
from topkv_transformers.requests import CacheRequests

MANIFEST, HEAD = "session", "topkv session 1"
Folder = str | PathLike[str]


def suspend(cache: TopkvCache, decoder: nn.Module, folder: Folder) -> None:
    """Write a cache to a folder, and close it.

    Args:
        folder: is made if it is not there. A session that it holds is replaced.

    Raises:
        RequestError: the cache is empty.
        CapabilityError: the model has layers that topkv leaves alone.
        OSError: it cannot be written; cache and folder are as they were, but for parts that
            belong to no session.
    """
    state, folder = cache.state, Path(folder)
    if not state.slots:
        raise RequestError("the cache is empty: there is nothing to suspend")
    if others := len(list(state.stock)):
        why = f"{others} layers keep states of their own, which no session holds yet"
        raise CapabilityError("this cache cannot be suspended", [why])
    coordinator, rows = cache.requests.coordinator, []
    with cache.requests.exclusive():
        folder.mkdir(parents=True, exist_ok=True)
        old, name = _parts_of(folder), uuid.uuid4().hex
        for number, slot in enumerate(state.slots):
            numbers, blocks = sessions.suspend(coordinator, slot)
            parts = [
                _write_part(folder / f"{name}-{number}-{at}.safetensors", block)
                for at, block in enumerate(blocks)
            ]
            rows.append({"request": numbers.as_dict(), "parts": parts})
        manifest = {
            "weights": digest_of(decoder),
            "seen": state.seen,
            "prompt": state.prompt,
            "padding": state.padding.tolist(),
            "rows": rows,
        }
        _sync(folder)
        body = json.dumps(manifest).encode()
        _replace(folder / MANIFEST, f"{HEAD} {zlib.crc32(body)}\n".encode() + body)
        _sync(folder)
        for path in old:
            path.unlink(missing_ok=True)
        cache.close()


def resume(requests: CacheRequests, decoder: nn.Module, folder: Folder) -> TopkvCache:
    """A cache of what a folder holds, which stays there.

    Raises:
        CapabilityError: there is no session, it is of another model or configuration, or damaged;
            with every reason that was found.
        DeviceMemoryError, HostMemoryError: no room. Nothing has changed.
    """
    folder = Path(folder)
    manifest = _read_manifest(folder)
    if manifest["weights"] != digest_of(decoder):
        raise _refused(folder, "it was suspended with other weights than those of this model")
    rows, cache = manifest["rows"], TopkvCache(requests)

    def row(number: int) -> int:
        state = sessions.Suspended(**rows[number]["request"])
        return sessions.resume(
            requests.coordinator, state, _read_parts(folder, rows[number]["parts"])
        )

    requests.begin(cache.state, len(rows), row)
    state = cache.state
    state.seen, state.prompt = manifest["seen"], manifest["prompt"]
    state.padding = np.asarray(manifest["padding"], dtype=np.int64)
    return cache


def _refused(folder: Path, *reasons: str) -> CapabilityError:
    return CapabilityError(f"the session in {folder} cannot be resumed", reasons)


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        head, _, body = (folder / MANIFEST).read_bytes().partition(b"\n")
    except OSError as error:
        raise _refused(folder, f"{MANIFEST} cannot be read: {error}") from error
    if head != f"{HEAD} {zlib.crc32(body)}".encode():
        raise _refused(folder, f"{MANIFEST} is damaged, or not of the form {HEAD!r}")
    manifest: dict[str, Any] = json.loads(body)
    return manifest


def _parts_of(folder: Path) -> list[Path]:
    """The files of the session that a folder holds, if it holds one."""
    try:
        rows = _read_manifest(folder)["rows"]
    except CapabilityError:
        return []
    return [folder / Path(part["file"]).name for row in rows for part in row["parts"]]


def _write_part(path: Path, block: Mapping[str, Tensor]) -> dict[str, Any]:
    data = save({name: tensor.contiguous() for name, tensor in block.items()})
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"file": path.name, "bytes": len(data), "crc32": zlib.crc32(data)}


def _read_parts(folder: Path, parts: list[dict[str, Any]]) -> Iterator[dict[str, Tensor]]:
    for part in parts:
        path = folder / Path(part["file"]).name  # no way out of the folder
        try:
            data = path.read_bytes()
        except OSError as error:
            raise _refused(folder, f"{path.name} cannot be read: {error}") from error
        if (len(data), zlib.crc32(data)) != (part["bytes"], part["crc32"]):
            raise _refused(
                folder,
                f"{path.name} is damaged: {len(data)} bytes of checksum {zlib.crc32(data)}, "
                f"expected {part['bytes']} of {part['crc32']}",
            )
        yield load(data)


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
