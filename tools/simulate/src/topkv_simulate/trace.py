"""A trace: selections of a coordinator's decode rows, and all else that moved their buffers.

The file, an npz, holds::

    header      JSON: format, version, settings, and the geometry of each group
    digest      SHA-256 of all the others
    rows        int32 [R, 7]   every decode row of every round, see ``ROW``
    events      int32 [E, 6]   what happened, in order, see ``EVENT``
    ids_g       int32 [R, L, H, K]   what the layers of group g selected, as the plan was given it
    limits_g    int32 [R]      units that the row could select
    counts_g    int32 [R, L, H, 2]   hits and misses, as the plan counted them

A round is one decode forward, or the warming of a request before its first one. R rows, L layers
of the group, H lanes a request, K the width of a selection. Text, keys and values are not in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from attrs import asdict, frozen

from topkv.errors import ReasonsError

FORMAT, VERSION = "topkv trace", 2


class ROW(IntEnum):
    """Columns of ``rows``. ``warm`` is 1 where a prompt's last query warmed the buffer; the others
    are those of ``StepTensors``."""

    round = 0
    slot = 1
    length = 2
    high = 3
    appended = 4
    resident = 5
    warm = 6


class EVENT(IntEnum):
    """Columns of ``events``; those behind ``slot`` are of WRITE and CLOSE alone."""

    kind = 0
    slot = 1
    start = 2
    end = 3
    high = 4
    resident = 5


class KIND(IntEnum):
    """Kinds of events.

    PLAN: the rows of the round that ``slot`` names are planned. WRITE: tokens ``start .. end`` of
    a request were stored, so a lane that fits its buffer holds their units from now on. CLOSE:
    like WRITE, of the units that the tokens fill. RESET: the buffer of a request is forgotten.
    """

    PLAN = 0
    WRITE = 1
    CLOSE = 2
    RESET = 3


class TraceError(ReasonsError):
    """A trace cannot be read, or lacks something."""


@frozen
class Geometry:
    """One sparse group of layers, see ``topkv.types.GroupShape`` and ``LoweredGroup``."""

    layers: tuple[int, ...]
    unit: int
    lane_heads: int
    select: int
    buffer_slots: int
    ring_slots: int
    max_units: int
    entry_bytes: int
    host_entry_bytes: int
    budget: int
    algorithm: str
    params: Mapping[str, Any]

    def ring_low(self, high: np.ndarray) -> np.ndarray:
        """Return the first unit in the ring, of requests whose length has reached ``high``."""
        low: np.ndarray = np.maximum(0, (high - 1) // self.unit - self.ring_slots + 1)
        return low

    def fits(self, high: Any, resident: Any, slots: int) -> Any:
        """Return True if slot u of a buffer of ``slots`` holds unit u for every closed unit u."""
        return np.logical_and(resident, (high - 1) // self.unit <= slots)


@frozen(eq=False)
class Group:
    """One group and what its layers did; arrays as in the file."""

    geometry: Geometry
    ids: np.ndarray
    limits: np.ndarray
    counts: np.ndarray


@frozen(eq=False)
class Trace:
    """Everything that is needed to replay selections exactly.

    Attributes:
        settings: ``model`` (its geometry), ``requests`` (slots), ``eviction``, ``transfer``,
            ``impl`` and ``topkv`` (the version) of the coordinator that was recorded.
        rows, events: as in the file.
        groups: the sparse groups.
    """

    settings: Mapping[str, Any]
    rows: np.ndarray
    events: np.ndarray
    groups: tuple[Group, ...]

    def save(self, path: Path) -> None:
        """Write the file; one that is there is replaced.

        Raises:
            OSError: it cannot be written.
        """
        header = {
            "format": FORMAT,
            "version": VERSION,
            "settings": dict(self.settings),
            "groups": [asdict(group.geometry) for group in self.groups],
        }
        reported = json.dumps(header, default=str)
        arrays: dict[str, Any] = {"rows": self.rows, "events": self.events}
        for index, group in enumerate(self.groups):
            arrays |= {f"{name}_{index}": getattr(group, name) for name in _SHAPES}
        arrays |= {"digest": _digest(reported, arrays), "header": reported}
        with path.open("wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read a file, which must be as it was written.

        Raises:
            TraceError: it is no trace, damaged, or of another version.
            OSError: it cannot be read.
        """
        refused = f"{path} cannot be replayed"
        try:
            arrays = _read(path)
            reported, digest = str(arrays.pop("header")), str(arrays.pop("digest", ""))
            header = json.loads(reported)
            found = header["format"], header["version"]
        except _DAMAGED as error:
            shown = f"{type(error).__name__}: {error}"
            why = f"expected an npz with a header, as topkv record writes it; {shown}"
            raise TraceError(refused, [why]) from error
        if found != (FORMAT, VERSION):
            why = f"expected {FORMAT!r} of version {VERSION}, got {found[0]!r} of {found[1]!r}"
            raise TraceError(refused, [f"{why}; record it anew with this topkv-simulate"])
        if digest != _digest(reported, arrays):
            raise TraceError(refused, ["it is not as it was written: damaged, or changed by hand"])
        shapes = [
            Geometry(**{**each, "layers": tuple(each["layers"])}) for each in header["groups"]
        ]
        groups = [
            Group(shape, **{name: arrays[f"{name}_{index}"] for name in _SHAPES})
            for index, shape in enumerate(shapes)
        ]
        return cls(header["settings"], arrays["rows"], arrays["events"], tuple(groups))


def _digest(header: str, arrays: Mapping[str, np.ndarray]) -> str:
    """Return a checksum of a header and of arrays with their names, dtypes and shapes."""
    found = hashlib.sha256(header.encode())
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(np.ascontiguousarray(array))
    return found.hexdigest()


_SHAPES = ("ids", "limits", "counts")

# np.load raises whatever zip, zlib and its own header parser raise, and where an array is larger
# than its data.
_DAMAGED = (
    *(ValueError, KeyError, TypeError, EOFError, SyntaxError, AttributeError),
    *(zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, MemoryError),
)


def _read(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of a file; raises whatever ``_DAMAGED`` names."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError("it is no regular file")
    with path.open("rb") as opened:
        if not zipfile.is_zipfile(opened):
            raise ValueError("the file is no zip archive, or its end is missing")
    with np.load(path, allow_pickle=False) as file:
        total = sum(member.file_size for member in file.zip.infolist())
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if total > memory:
            raise ValueError(f"its arrays have {total} bytes, and this machine has {memory}")
        return {name: file[name] for name in file.files}
