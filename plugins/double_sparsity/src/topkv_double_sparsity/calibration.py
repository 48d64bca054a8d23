"""The calibration file: how important each channel of each kv-head is. JSON, no torch here.

::

    {
      "format": "topkv-double-sparsity-1",
      "kind": "importance",          or "channels"
      "statistic": "qk_span",        one of STATISTICS
      "layers": {"0": [[...], ...], "1": ...},
      "ranges": {"0": [[[...], ...], [[...], ...]], "1": ...}
    }

``layers`` maps the number of a layer to one row per kv-head, of head_dim values. Of kind
``"importance"`` a value is finite and at least 0, and the larger is the more important. Of kind
``"channels"`` a row is a permutation of 0 .. head_dim - 1, the most important channel first.
Layers that topkv does not decode sparsely may be missing. ``ranges`` has the least and the largest
value of each channel in the same way, twice as many rows a layer; it may be missing, or lack
layers: no channel is taken for large then. Further keys are ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import Factory, frozen

from topkv.errors import ConfigError

FORMAT = "topkv-double-sparsity-1"
KINDS = ("importance", "channels")

PROMPT_STATISTICS = ("qk_span", "qk", "q", "k", "k_var")
STATISTICS = (*PROMPT_STATISTICS, "k_weight")
"""``k_weight`` is a property of a model's weights; the others are statistics of activations."""

DEFAULT_STATISTIC = "qk_span"

Rows = list[list[float]]


@frozen
class Calibration:
    """The content of a file.

    Attributes:
        statistic: one of ``STATISTICS``.
        layers: importance by layer, ``[Hkv][D]``, the larger the more important.
        ranges: least and largest values of channels by layer, ``[2][Hkv][D]``; may lack layers.
    """

    statistic: str
    layers: dict[int, Rows]
    ranges: dict[int, list[Rows]] = Factory(dict)


def write(
    path: Path,
    statistic: str,
    layers: dict[int, Rows],
    ranges: dict[int, list[Rows]] | None = None,
) -> None:
    """Write importance values by layer number, and ranges if there are any."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "kind": "importance",
        "statistic": statistic,
        "layers": {str(layer): rows for layer, rows in layers.items()},
    }
    if ranges:
        content["ranges"] = {str(layer): ends for layer, ends in ranges.items()}
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def read(path: str | Path, layers: Sequence[int], kv_heads: int, dim: int) -> Calibration:
    """Read and check a file.

    Args:
        path: of the file.
        layers: the layers that must be there.
        kv_heads, dim: geometry of each layer.

    Raises:
        ConfigError: with everything that is wrong with the file.
    """
    what = f"double_sparsity: calibration file {str(path)!r}"
    make = "make one with 'topkv calibrate double_sparsity'"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(what, [f"cannot be read: {error.strerror or error}; {make}"]) from error
    except ValueError as error:
        raise ConfigError(what, [f"is no JSON: {error}; {make}"]) from error
    if not isinstance(content, dict):
        got = type(content).__name__
        raise ConfigError(what, [f"must hold an object with format, kind, layers, got {got}"])
    reasons = _head_reasons(content)
    written = content.get("layers")
    found: dict[int, Rows] = {}
    ranges: dict[int, list[Rows]] = {}
    if not isinstance(written, dict):
        reasons.append(f"layers must be an object by layer number, got {type(written).__name__}")
    else:
        reasons += _layer_reasons(written, layers, kv_heads, dim, content.get("kind"))
        if not reasons:
            found = {layer: _importance(written[str(layer)], content["kind"]) for layer in layers}
    ends = content.get("ranges", {})
    if isinstance(ends, dict):
        ranges = {layer: ends[str(layer)] for layer in layers if str(layer) in ends}
        reasons += [
            f"ranges of layer {layer}: {problem}"
            for layer in ranges
            if (problem := _range_problem(ranges[layer], kv_heads, dim))
        ]
    else:
        reasons.append(f"ranges must be an object by layer number, got {type(ends).__name__}")
    if reasons:
        raise ConfigError(what, reasons)
    return Calibration(content["statistic"], found, ranges)


def _head_reasons(content: dict[str, Any]) -> list[str]:
    reasons = []
    if content.get("format") != FORMAT:
        reasons.append(f"format must be {FORMAT!r}, got {content.get('format')!r}")
    if content.get("kind") not in KINDS:
        reasons.append(f"kind must be one of {KINDS}, got {content.get('kind')!r}")
    if content.get("statistic") not in STATISTICS:
        reasons.append(f"statistic must be one of {STATISTICS}, got {content.get('statistic')!r}")
    return reasons


def _layer_reasons(
    written: dict[str, Any], layers: Sequence[int], kv_heads: int, dim: int, kind: object
) -> list[str]:
    reasons = []
    missing = [layer for layer in layers if str(layer) not in written]
    if missing:
        reasons.append(
            f"layers {missing} are missing, the file has {sorted(written)}; calibrate the model "
            "that you decode, or make those layers dense"
        )
    for layer in layers:
        rows = written.get(str(layer))
        if str(layer) not in written:
            continue
        if not isinstance(rows, list) or len(rows) != kv_heads:
            got = len(rows) if isinstance(rows, list) else type(rows).__name__
            reasons.append(f"layer {layer}: expected a list of {kv_heads} kv-heads, got {got}")
            continue
        for head, row in enumerate(rows):
            problem = _row_problem(row, dim, kind)
            if problem:
                reasons.append(f"layer {layer}, kv-head {head}: {problem}")
    return reasons


def _row_problem(row: object, dim: int, kind: object) -> str | None:
    if not isinstance(row, list) or len(row) != dim:
        got = len(row) if isinstance(row, list) else type(row).__name__
        return f"expected a list of {dim} values, one for each channel, got {got}"
    if kind == "channels":
        if any(type(value) is not int for value in row) or sorted(row) != list(range(dim)):
            return f"expected a permutation of 0 .. {dim - 1}"
        return None
    for channel, value in enumerate(row):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < 0:
            return f"channel {channel}: expected a finite number of at least 0, got {value!r}"
    return None


def _range_problem(ends: Any, kv_heads: int, dim: int) -> str | None:
    if not _holds_numbers(ends, (2, kv_heads, dim)):
        return (
            f"expected the least and the largest values of {kv_heads} kv-heads of {dim} channels"
        )
    least, most = ([value for row in end for value in row] for end in ends)
    if any(low > high for low, high in zip(least, most, strict=True)):
        return "expected no least value above the largest"
    return None


def _holds_numbers(value: object, shape: Sequence[int]) -> bool:
    """True if a value is finite numbers in lists of these lengths."""
    if not shape:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    fits = isinstance(value, list) and len(value) == shape[0]
    return fits and all(_holds_numbers(each, shape[1:]) for each in value)  # type: ignore[attr-defined]


def _importance(rows: list[list[Any]], kind: str) -> Rows:
    if kind == "importance":
        return [[float(value) for value in row] for row in rows]
    result = []
    for row in rows:
        values = [0.0] * len(row)
        for place, channel in enumerate(row):
            values[channel] = float(len(row) - place)
        result.append(values)
    return result
