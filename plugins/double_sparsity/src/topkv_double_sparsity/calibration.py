"""The calibration file: how important each channel of each kv-head is. JSON, no torch here.

::

    {
      "format": "topkv-double-sparsity-1",
      "kind": "importance",
      "layers": {"0": [[...], ...], "1": ...},
      "ranges": {"0": [[[...], ...], [[...], ...]], "1": ...}
    }

``layers`` maps the number of a layer to one row per kv-head, of head_dim values: finite and at
least 0, and the larger the more important. Layers that topkv does not decode sparsely may be
missing. ``ranges`` has the least and the largest value of each channel in the same way, twice as
many rows a layer; it may be missing, or lack layers: no channel is taken for large then. Further
keys are ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from topkv.errors import ConfigError

HEAD = {"format": "topkv-double-sparsity-1", "kind": "importance"}

Rows = list[list[float]]


@frozen
class Calibration:
    """The content of a file.

    Attributes:
        layers: importance by layer, ``[Hkv][D]``, the larger the more important.
        ranges: least and largest values of channels by layer, ``[2][Hkv][D]``; may lack layers.
    """

    layers: dict[int, Rows]
    ranges: dict[int, list[Rows]]


def write(path: Path, layers: dict[int, Rows], ranges: dict[int, list[Rows]]) -> None:
    """Write importance values and ranges by layer number."""
    content = {
        **HEAD,
        "layers": {str(layer): rows for layer, rows in layers.items()},
        "ranges": {str(layer): ends for layer, ends in ranges.items()},
    }
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
    reasons = [
        f"{key} must be {value!r}, got {content.get(key)!r}; {make}"
        for key, value in HEAD.items()
        if content.get(key) != value
    ]
    written = {key: content.get(key, {}) for key in ("layers", "ranges")}
    for key, given in written.items():
        if not isinstance(given, dict):
            reasons.append(f"{key} must be an object by layer number, got {type(given).__name__}")
            written[key] = {}
    found, ranges = (
        {layer: given[str(layer)] for layer in layers if str(layer) in given}
        for given in written.values()
    )
    missing = [layer for layer in layers if layer not in found]
    if missing and isinstance(content.get("layers"), dict):
        reasons.append(
            f"layers {missing} are missing, the file has {sorted(written['layers'])}; calibrate "
            "the model that you decode, or make those layers dense"
        )
    for layer, rows in found.items():
        if not _holds_numbers(rows, (kv_heads, dim), 0.0):
            reasons.append(
                f"layer {layer}: expected {kv_heads} kv-heads of {dim} channels, finite numbers "
                "of at least 0"
            )
    for layer, ends in ranges.items():
        if problem := _range_problem(ends, kv_heads, dim):
            reasons.append(f"ranges of layer {layer}: {problem}")
    if reasons:
        raise ConfigError(what, reasons)
    return Calibration(found, ranges)


def _range_problem(ends: Any, kv_heads: int, dim: int) -> str | None:
    if not _holds_numbers(ends, (2, kv_heads, dim)):
        return (
            f"expected the least and the largest values of {kv_heads} kv-heads of {dim} channels"
        )
    least, most = ([value for row in end for value in row] for end in ends)
    if any(low > high for low, high in zip(least, most, strict=True)):
        return "expected no least value above the largest"
    return None


def _holds_numbers(value: Any, shape: Sequence[int], least: float = -math.inf) -> bool:
    """True if a value is finite numbers, not below ``least``, in lists of these lengths."""
    if not shape:
        return type(value) in (int, float) and math.isfinite(value) and value >= least
    fits = isinstance(value, list) and len(value) == shape[0]
    return fits and all(_holds_numbers(each, shape[1:], least) for each in value)
