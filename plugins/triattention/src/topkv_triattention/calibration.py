"""The calibration file: what queries of a model are like before RoPE, and how RoPE turns them.

JSON, no torch here::

    {
      "format": "topkv-triattention-1",
      "layers": {
        "0": {
          "pairs": [[0, 32], [1, 33], ...],
          "frequencies": [1.0, 0.66, ...],
          "mean": [[...], ...],
          "size": [[...], ...]
        },
        "1": ...
      }
    }

Of a head dim D each layer has D / 2 ``pairs`` of channels that are turned together, and each
channel is in one of them; position p turns pair f by ``frequencies[f] * p`` radians, from its
first channel towards the second one. Channels that RoPE leaves alone are pairs of frequency 0. For
each query head ``mean`` has the mean of all queries, turned back to position 0, D numbers by
channel, and ``size`` the mean length of their pairs, D / 2 numbers. A factor that RoPE puts on
queries is in both. Layers that topkv does not decode sparsely may be missing. Further keys are
ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from topkv.errors import ConfigError

FORMAT = "topkv-triattention-1"
MAKE = "make one with 'python -m topkv_triattention.collect'"


@frozen
class LayerQueries:
    """What a file says of a layer, see above.

    Attributes:
        pairs: ``[D / 2][2]``.
        frequencies: ``[D / 2]`` radians a token.
        mean: ``[H][D]``.
        size: ``[H][D / 2]``.
    """

    pairs: list[list[int]]
    frequencies: list[float]
    mean: list[list[float]]
    size: list[list[float]]


def write(path: Path, layers: Mapping[int, LayerQueries]) -> None:
    """Write what is known of queries, by layer number."""
    found = {str(layer): asdict(layers[layer]) for layer in sorted(layers)}
    path.write_text(json.dumps({"format": FORMAT, "layers": found}) + "\n", encoding="utf-8")


def read(path: str | Path, layers: Sequence[int], heads: int, dim: int) -> dict[int, LayerQueries]:
    """Read and check a file.

    Args:
        path: of the file.
        layers: the layers that must be there.
        heads, dim: query heads and head dim of each layer.

    Raises:
        ConfigError: with everything that is wrong with the file.
    """
    what = f"triattention: calibration file {str(path)!r}"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(what, [f"cannot be read: {error.strerror or error}; {MAKE}"]) from error
    except ValueError as error:
        raise ConfigError(what, [f"is no JSON: {error}; {MAKE}"]) from error
    if not isinstance(content, dict):
        got = type(content).__name__
        raise ConfigError(what, [f"must hold an object with format and layers, got {got}"])
    reasons, written = [], content.get("layers")
    if content.get("format") != FORMAT:
        reasons.append(f"format must be {FORMAT!r}, got {content.get('format')!r}")
    if not isinstance(written, dict):
        got = type(written).__name__
        raise ConfigError(what, [*reasons, f"layers must be an object by layer number, got {got}"])
    missing = [layer for layer in layers if str(layer) not in written]
    if missing:
        reasons.append(
            f"layers {missing} are missing, the file has {sorted(written)}; calibrate the model "
            "that you decode, or make those layers dense"
        )
    there = [layer for layer in layers if layer not in missing]
    reasons += [
        f"layer {layer}: {reason}"
        for layer in there
        for reason in _layer_reasons(written[str(layer)], heads, dim)
    ]
    if reasons:
        raise ConfigError(what, reasons)
    names = LayerQueries.__annotations__
    return {
        layer: LayerQueries(**{name: written[str(layer)][name] for name in names})
        for layer in there
    }


def _layer_reasons(layer: object, heads: int, dim: int) -> list[str]:
    if not isinstance(layer, dict):
        return [f"expected an object with pairs, frequencies, mean, size, got {layer!r:.40}"]
    pairs, reasons = layer.get("pairs"), []
    lists = isinstance(pairs, list) and all(isinstance(pair, list) for pair in pairs)
    two = lists and all(len(pair) == 2 for pair in pairs)
    channels = [channel for pair in pairs for channel in pair] if two else []
    whole = all(type(channel) is int for channel in channels)
    if not whole or sorted(channels) != list(range(dim)):
        reasons.append(f"pairs must hold each channel of 0 .. {dim - 1} once, two by two")
    reasons += _row_reasons("frequencies", [layer.get("frequencies")], dim // 2)
    for name, length in (("mean", dim), ("size", dim // 2)):
        rows = layer.get(name)
        if not isinstance(rows, list) or len(rows) != heads:
            got = len(rows) if isinstance(rows, list) else type(rows).__name__
            reasons.append(f"{name} must be a list of {heads} query heads, got {got}")
        else:
            reasons += _row_reasons(name, rows, length)
    return reasons


def _row_reasons(name: str, rows: Sequence[object], length: int) -> list[str]:
    """At most one reason: rows of a file are wrong together."""
    for row in rows:
        if not isinstance(row, list) or len(row) != length:
            got = len(row) if isinstance(row, list) else type(row).__name__
            return [f"{name} must have {length} numbers for head dim {2 * length}, got {got}"]
        bad = [value for value in row if not _number(value)]
        if bad:
            return [f"{name} must have finite numbers, got {bad[0]!r}"]
    return []


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and type(value) is not bool and math.isfinite(value)
