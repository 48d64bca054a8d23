"""A trace: selections of a coordinator's decode rows, and all else that moved their buffers.

The file, an npz, holds::

    header      JSON: format, version, settings, and the geometry of each group
    rows        int32 [R, 7]   every decode row of every round, see ``ROW``
    events      int32 [E, 6]   what happened, in order, see ``EVENT``
    ids_g       int32 [R, L, H, K]   what the layers of group g selected, as the plan was given it
    limits_g    int32 [R]      units that the row could select
    counts_g    int32 [R, L, H, 2]   hits and misses, as the plan counted them

A round is one decode forward, or the warming of a request before its first one. R rows, L layers
of the group, H lanes a request, K the width of a selection. Text, keys and values are not in it.
"""

from __future__ import annotations

import json
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from attrs import asdict, fields, frozen
from numpy.lib import format as npy

from topkv.errors import ReasonsError
from topkv.messages import shown

FORMAT, VERSION = "topkv trace", 1


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
    like WRITE, if the last of the tokens fills its unit. RESET: the buffer of a request is
    forgotten.
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

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Geometry:
        """Make the geometry from a header that was checked."""
        values = {field.name: group[field.name] for field in fields(cls)}
        return cls(**{**values, "layers": tuple(group["layers"])})

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
        reported = np.array(json.dumps(header, default=str))
        arrays: dict[str, Any] = {"header": reported, "rows": self.rows, "events": self.events}
        for index, group in enumerate(self.groups):
            arrays |= {f"{name}_{index}": getattr(group, name) for name in _SHAPES}
        with path.open("wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read a file and check all of it.

        Raises:
            TraceError: it is no trace, damaged, or of another version; with every reason.
            OSError: it cannot be read.
        """
        refused = f"{path} cannot be replayed"
        try:
            header, arrays = _read(path)
            found = header["format"], header["version"]
        except _DAMAGED as error:
            why = f"expected an npz with a header, as topkv record writes it; {_shown(error)}"
            raise TraceError(refused, [why]) from error
        if found != (FORMAT, VERSION):
            why = f"expected {FORMAT!r} of version {VERSION}, got {found[0]!r} of {found[1]!r}"
            raise TraceError(refused, [f"{why}; record it anew with this topkv-simulate"])
        reasons = list(_header_reasons(header))
        if reasons:
            raise TraceError(refused, reasons)
        shapes = list(map(Geometry.of, header["groups"]))
        reasons = list(_array_reasons(arrays, shapes)) or list(
            _value_reasons(arrays, shapes, header["settings"]["requests"])
        )
        if reasons:
            raise TraceError(refused, reasons)
        groups = [
            Group(shape, **{name: arrays[f"{name}_{index}"] for name in _SHAPES})
            for index, shape in enumerate(shapes)
        ]
        return cls(header["settings"], arrays["rows"], arrays["events"], tuple(groups))


_SHAPES = ("ids", "limits", "counts")

# np.load raises whatever zip, zlib and its own header parser raise.
_DAMAGED = (
    *(ValueError, KeyError, TypeError, EOFError, SyntaxError, AttributeError),
    *(zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError),
)


_HEADERS: dict[tuple[int, int], Callable[..., Any]] = {
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
}


def _read(path: Path) -> tuple[Any, dict[str, np.ndarray]]:
    """Read header and arrays of a file; raises whatever ``_DAMAGED`` names."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError("it is no regular file")
    with path.open("rb") as opened:
        if not zipfile.is_zipfile(opened):
            raise ValueError("the file is no zip archive, or its end is missing")
    with np.load(path, allow_pickle=False) as file:
        _check_sizes(file.zip)
        arrays = {name: file[name] for name in file.files}
    return json.loads(str(arrays.pop("header"))), arrays


def _check_sizes(archive: zipfile.ZipFile) -> None:
    """Raise ValueError where arrays are larger than their data in the file, or than the memory of
    this machine, before any is made."""
    total = 0
    for info in archive.infolist():
        with archive.open(info) as member:
            version = npy.read_magic(member)
            if version not in _HEADERS:
                raise ValueError(f"{info.filename} is of npy version {version}")
            shape, _, dtype = _HEADERS[version](member)
            if dtype.hasobject:
                continue  # which numpy does not load
            stated = member.tell() + math.prod(shape) * dtype.itemsize
        if stated != info.file_size:
            raise ValueError(
                f"{info.filename} states {stated} bytes, and {info.file_size} are there"
            )
        total += stated
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if total > memory:
        raise ValueError(f"its arrays have {total} bytes, and this machine has {memory}")


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _header_reasons(header: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against settings and geometry; empty where they can be relied on."""
    settings, groups = header.get("settings"), header.get("groups")
    if not isinstance(settings, dict) or not isinstance(groups, list) or not groups:
        yield "expected settings and at least one group in the header"
        return
    if not _is_count(settings.get("requests")) or not isinstance(settings.get("eviction"), str):
        yield "expected a number of requests and the name of an eviction policy in the settings"
    sizes = [field.name for field in fields(Geometry) if field.type in (int, "int")]
    for index, group in enumerate(groups):
        if not isinstance(group, dict):
            yield f"group {index}: expected an object, got {type(group).__name__}"
            continue
        wrong = {name: group.get(name) for name in sizes if not _is_count(group.get(name))}
        layers = group.get("layers")
        if not isinstance(layers, list) or not layers or {type(x) for x in layers} != {int}:
            wrong["layers"] = layers
        wrong |= {
            name: group.get(name)
            for name, kind in (("algorithm", str), ("params", dict))
            if not isinstance(group.get(name), kind)
        }
        for name, value in wrong.items():
            yield f"group {index}: {name} is {shown(value)}"
        if not wrong and group["select"] > group["buffer_slots"]:
            yield f"group {index}: a buffer of {group['buffer_slots']} holds no selection"


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value < 2**31


def _array_reasons(arrays: Mapping[str, np.ndarray], shapes: list[Geometry]) -> Iterator[str]:
    """Reasons against the arrays: one is missing, or has another shape or dtype."""
    rows = len(arrays["rows"]) if "rows" in arrays and arrays["rows"].ndim else 0
    events = len(arrays["events"]) if "events" in arrays and arrays["events"].ndim else 0
    expected: dict[str, tuple[int, ...]] = {
        "rows": (rows, len(ROW)),
        "events": (events, len(EVENT)),
    }
    for index, shape in enumerate(shapes):
        lanes = (rows, len(shape.layers), shape.lane_heads)
        expected |= {
            f"ids_{index}": (*lanes, shape.select),
            f"limits_{index}": (rows,),
            f"counts_{index}": (*lanes, 2),
        }
    for name, size in expected.items():
        found = arrays.get(name)
        if found is None:
            yield f"{name}: expected int32 {list(size)}, missing"
        elif found.dtype != np.int32 or found.shape != size:
            yield f"{name}: expected int32 {list(size)}, got {found.dtype} {list(found.shape)}"


def _value_reasons(
    arrays: Mapping[str, np.ndarray], shapes: list[Geometry], requests: int
) -> Iterator[str]:
    """Reasons against what stands in them; whatever passes can be replayed without an error."""
    rows, events = arrays["rows"], arrays["events"]
    rounds = rows[:, ROW.round]
    steps = np.diff(rounds, prepend=-1)
    count = int(rounds[-1]) + 1 if len(rounds) else 0
    longest = min((shape.max_units * shape.unit for shape in shapes), default=math.inf)
    ranges: dict[str, Any] = {
        "the rounds of rows go up one by one": (rounds >= 0) & (steps >= 0) & (steps <= 1),
        "slots of rows are those of requests": _within(rows[:, ROW.slot], 0, requests),
        "lengths of rows fit their requests": _within(rows[:, ROW.length], 0, longest + 1),
        "high is no less than length": rows[:, ROW.high] >= rows[:, ROW.length],
        "flags of rows are 0 or 1": _within(rows[:, ROW.appended :], 0, 2),
        "kinds of events are known": _within(events[:, EVENT.kind], 0, len(KIND)),
    }
    plans = events[events[:, EVENT.kind] == KIND.PLAN, EVENT.slot]
    others = events[events[:, EVENT.kind] != KIND.PLAN]
    start, end = others[:, EVENT.start], others[:, EVENT.end]
    ranges |= {
        "every round is planned once, in order": np.array_equal(plans, np.arange(count)),
        "slots of events are those of requests": _within(others[:, EVENT.slot], 0, requests),
        "tokens of events fit their requests": (start >= 0) & (start <= end) & (end <= longest),
    }
    twice = np.unique(rows[:, [ROW.round, ROW.slot]], axis=0)
    ranges["a round has one row of a request"] = len(twice) == len(rows)
    for index, shape in enumerate(shapes):
        limits, counts = arrays[f"limits_{index}"], arrays[f"counts_{index}"]
        ranges[f"limits_{index} fit their requests"] = _within(limits, 0, shape.max_units + 1)
        ranges[f"counts_{index} fit the selection"] = _within(counts, 0, shape.select + 1)
    for what, holds in ranges.items():
        if not np.all(holds):
            yield f"expected that {what}; this file is damaged, or was made by hand"


def _within(values: np.ndarray, low: float, high: float) -> np.ndarray:
    return (values >= low) & (values < high)
