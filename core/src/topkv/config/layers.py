"""Overrides of single layers: ``{"0-1": "resident", "2-": "quest", "5": {"budget": 512}}``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from topkv.checks import Check, Refused, clean, need, one_of
from topkv.messages import shown

DENSE = ("resident", "streamed")
RESIDENCIES = ("sparse", *DENSE)

_RANGE = re.compile(r"(\d{1,9})(?:(-)(\d{1,9})?)?")

Range = tuple[int, int | None]
"""First and last layer, both included; None for the last layer of the model."""


@frozen
class LayerOverride:
    """One key of the setting ``layers``, and the settings below it.

    Attributes:
        text: the key as it was written.
        ranges: the layers.
        values: checked values by key.
    """

    text: str
    ranges: tuple[Range, ...]
    values: Mapping[str, Any]


def parse_ranges(text: object) -> tuple[Range, ...]:
    """``"5"``, ``"0-3"``, ``"2-"``, or several of them between commas.

    Raises:
        ValueError: the text is none of them, or a range runs backwards.
    """
    ranges: list[Range] = []
    for part in str(text).split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None or isinstance(text, bool):
            raise ValueError(f"key {shown(text)} must look like '5', '0-3', '2-' or '0,4-7'")
        first = int(match[1])
        last = first if match[2] is None else int(match[3]) if match[3] else None
        if last is not None and last < first:
            raise ValueError(f"key {shown(text)} runs backwards; write '{last}-{first}'")
        ranges.append((first, last))
    return tuple(ranges)


def overrides(checks: Mapping[str, Check]) -> Check:
    """The check of a mapping of overrides: all of them, in the order in which they were written.

    Args:
        checks: of the settings that an override of sparse layers may hold.
    """
    keys = {"residency": one_of(RESIDENCIES), **checks}

    def check(value: Any) -> tuple[LayerOverride, ...]:
        need(isinstance(value, Mapping), "map layers such as '0-1' to what they do", value)
        found: list[LayerOverride] = []
        reasons: list[str] = []
        for key, item in value.items():
            try:
                ranges = parse_ranges(key)
            except ValueError as error:
                reasons.append(f" {error}")
                continue
            values = _override(item, keys, f"[{shown(str(key))}]", reasons)
            found.append(LayerOverride(str(key), ranges, values))
        if reasons:
            raise Refused(reasons, tuple(found))
        return tuple(found)

    return check


def _override(
    value: Any, checks: Mapping[str, Check], where: str, reasons: list[str]
) -> dict[str, Any]:
    """An override of some layers in lowered form: a residency, an algorithm, or several values."""
    if isinstance(value, str) and value:
        known = value in RESIDENCIES
        return {"residency": value} if known else {"residency": "sparse", "algorithm": value}
    if not isinstance(value, Mapping):
        words = ", ".join(map(repr, RESIDENCIES))
        reasons.append(f"{where} must be {words}, an algorithm, or a mapping, got {shown(value)}")
        return {}
    good = clean(value, checks, reasons, f"{where} ")
    if good.get("residency") in DENSE and len(good) > 1:
        others = ", ".join(key for key in good if key != "residency")
        reasons.append(f"{where} is {good['residency']}, so it takes no {others}")
    return {"residency": "sparse", **good} if "algorithm" in good else good


def show_ranges(layers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as ``"0-2,5"``."""
    parts: list[list[int]] = []
    for layer in sorted(layers):
        if parts and parts[-1][1] == layer - 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
