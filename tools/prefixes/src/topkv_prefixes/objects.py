"""The form of a stored page: a header of 4096 bytes, and the bytes of the page behind it.

The header has the version of this form, the key, a fingerprint of what the bytes depend on, their
number and checksum, and a checksum of itself. An object with another value in any of them is no
page. Imports no torch, so that commands can look at what is stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from struct import Struct

import numpy as np
import xxhash

from topkv_prefixes.storage import OWNER_BYTES

MAGIC, VERSION = b"topkv-pg", 1
HEADER = 4096
"""Bytes of the header, so that the page behind it is aligned for disks and network cards."""

SLICE = 1 << 20
"""Bytes that are hashed at a time; other threads have a turn in between."""

_FIELDS = Struct("<8sIIQ32s32s16s")
_SEAL = 16


def owner_of(tenant: str) -> bytes:
    """Return the bytes that the keys of a tenant's pages begin with."""
    return hashlib.sha256(b"topkv tenant " + tenant.encode()).digest()[:OWNER_BYTES]


def digest_of(parts: Iterable[np.ndarray]) -> bytes:
    """Return XXH3 of 128 bits over parts, one behind the other. Finds damage, not forgery."""
    found = xxhash.xxh3_128()
    for part in parts:
        for at in range(0, len(part), SLICE):
            found.update(part[at : at + SLICE].data)
    return found.digest()


def write_header(
    header: np.ndarray, key: bytes, fingerprint: bytes, body: Sequence[np.ndarray]
) -> None:
    """Fill a header.

    Args:
        header: uint8 ``[HEADER]``.
        key: 32 bytes, under which the object is stored.
        fingerprint: 32 bytes, of all that the bytes depend on.
        body: the parts of the page.
    """
    size = sum(len(part) for part in body)
    fields = _FIELDS.pack(MAGIC, VERSION, HEADER, size, key, fingerprint, digest_of(body))
    whole = fields + xxhash.xxh3_128_digest(fields)
    header[:] = 0
    header[: len(whole)] = np.frombuffer(whole, dtype=np.uint8)


def problem_of(
    header: np.ndarray, body: Sequence[np.ndarray], key: bytes, fingerprint: bytes | None
) -> str | None:
    """Return why header and parts are not the expected page; None where they are.

    Args:
        header, body: as of ``write_header``.
        key: under which the object was found.
        fingerprint: None where any will do.
    """
    raw = header.tobytes()
    fields, seal = raw[: _FIELDS.size], raw[_FIELDS.size : _FIELDS.size + _SEAL]
    if len(raw) != HEADER or xxhash.xxh3_128_digest(fields) != seal:
        return "its header is damaged"
    magic, version, length, size, named, depends, digest = _FIELDS.unpack(fields)
    if (magic, version, length) != (MAGIC, VERSION, HEADER):
        return f"it is of version {version}, expected {VERSION}"
    if named != key:
        return "it is the page of another key"
    if fingerprint is not None and depends != fingerprint:
        return "it is of another model or configuration"
    if size != sum(len(part) for part in body):
        return f"it has {sum(len(part) for part in body)} bytes, expected {size}"
    if digest_of(body) != digest:
        return "its checksum is another one"
    return None


def fingerprint_in(header: np.ndarray) -> bytes:
    """Return the fingerprint that a header states, which may be damaged."""
    found: bytes = _FIELDS.unpack(header[: _FIELDS.size].tobytes())[5]
    return found
