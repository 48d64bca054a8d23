"""What each key of the configuration may hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from typing import Any

from topkv.config.layers import Refused, parse_overrides
from topkv.entries import IMPLS, SCOPES
from topkv.kv.layout import LAYOUTS
from topkv.kv.rows import KV_FORMATS
from topkv.messages import close, shown

MOST = 2**31 - 1
"""Of anything that is counted: tensors of ids are int32."""

MOST_BYTES = 2**63 - 1
MOST_LAYERS = 2**16
DEEPEST = 16
"""Containers in containers, in the value of a parameter."""

DENSE = ("resident", "streamed")
RESIDENCIES = ("sparse", *DENSE)

Check = Callable[[Any], Any]
"""Gives back the value in its lowered form; raises ValueError with what it must be."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def _count(value: Any) -> int:
    if type(value) is not int or value <= 0:
        raise ValueError(f"must be a positive int, got {shown(value)}")
    if value > MOST:
        raise ValueError(f"must be at most {MOST}, got {shown(value)}")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, got {shown(value)}")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be the name of a plugin, got {shown(value)}")
    return value


def _one_of(choices: tuple[str, ...]) -> Check:
    def check(value: Any) -> Any:
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"must be one of {', '.join(map(repr, choices))}, got {shown(value)}")
        return value

    return check


def _params(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"must map names of parameters to values, got {shown(value)}")
    inside: list[Any] = [value]
    for _ in range(DEEPEST):
        # Each container once, or one that holds itself, or another often, would never end.
        inside = list({id(item): item for each in inside for item in _containers(each)}.values())
    if inside:
        raise ValueError(f"must be nested at most {DEEPEST} deep, got {shown(value)}")
    return dict(value)


def _containers(value: Any) -> Iterable[Any]:
    items = chain(value, value.values()) if isinstance(value, Mapping) else value
    return (item for item in items if isinstance(item, (Mapping, list, tuple)))


def _layer_list(value: Any) -> tuple[int, ...]:
    known = isinstance(value, (list, tuple, range, set, frozenset))
    layers = list(islice(value, MOST_LAYERS + 1)) if known else []
    if len(layers) > MOST_LAYERS:
        raise ValueError(f"must be a list of at most {MOST_LAYERS} layers, got {shown(value)}")
    if not known or not all(type(layer) is int and 0 <= layer <= MOST for layer in layers):
        raise ValueError(f"must be a list of layer numbers from 0, got {shown(value)}")
    return tuple(sorted(set(layers)))


def byte_size(value: Any) -> int:
    """Bytes of an int or of a text such as ``"64GiB"`` (1024) or ``"64GB"`` (1000)."""
    size = value if type(value) is int else _text_size(value)
    if size <= 0:
        raise ValueError(
            f"must be a positive number of bytes or a size like '64GiB', got {shown(value)}"
        )
    if size > MOST_BYTES:
        raise ValueError(f"must be at most {MOST_BYTES} bytes, got {shown(value)}")
    return int(size)


def _text_size(value: Any) -> float:
    """Bytes that a text names, a float because it may name any number; 0 if it names none."""
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return 0
    prefix = (match[2] or "").lower()
    power: int = (1024 if prefix.endswith("i") else 1000) ** _POWER[prefix[:1]]
    return float(match[1]) * power


_LAYER_CHECKS: dict[str, Check] = {
    "algorithm": _name,
    "scope": _one_of(SCOPES),
    "unit": _count,
    "budget": _count,
    "buffer": _count,
    "regranulate": _flag,
    "params": _params,
}

CHECKS: dict[str, Check] = {
    **_LAYER_CHECKS,
    "backend": _name,
    "transfer": _name,
    "eviction": _name,
    "topk": _name,
    "impl": _one_of(IMPLS),
    "ring_tokens": _count,
    "page_tokens": _count,
    "max_requests": _count,
    "max_tokens": _count,
    "max_request_tokens": _count,
    "kv_format": _one_of(KV_FORMATS),
    "host_layout": _one_of(LAYOUTS),
    "host_memory": byte_size,
    "device_memory": byte_size,
    "dense_layers": _layer_list,
    "dense_residency": _one_of(DENSE),
    "layers": lambda value: parse_overrides(value, _check_override),
    "resident_fast_path": _flag,
    "poison": _flag,
    "prefill_block_tokens": _count,
}


def near(name: object, known: Iterable[str]) -> str:
    """What the writer may have meant, or all there is."""
    known = sorted(known)
    return close(name, known) or f"known: {', '.join(known) or 'none'}"


def clean(
    values: Mapping[Any, Any],
    reasons: list[str],
    where: str = "",
    checks: Mapping[str, Check] = CHECKS,
) -> dict[str, Any]:
    """The values that are right, in lowered form; why the others are not goes to ``reasons``.

    Args:
        values: by key; None counts as not set.
        reasons: gets one text for each value that is refused.
        where: stands before each reason.
        checks: the keys there are.
    """
    good = {}
    for key, value in values.items():
        if key not in checks:
            reasons.append(f"{where}unknown key {shown(key)}; {near(key, checks)}")
        elif value is not None:
            try:
                good[key] = checks[key](value)
            except Refused as error:
                reasons += [f"{where}{key}{reason}" for reason in error.reasons]
                good[key] = error.good
            except ValueError as error:
                reasons.append(f"{where}{key} {error}")
    return good


def _check_override(value: Any) -> dict[str, Any]:
    """An override of some layers in lowered form: a residency, an algorithm, or several values."""
    if isinstance(value, str) and value in RESIDENCIES:
        return {"residency": value}
    if isinstance(value, str) and value:
        return {"residency": "sparse", "algorithm": value}
    if not isinstance(value, Mapping):
        words = ", ".join(map(repr, RESIDENCIES))
        raise ValueError(f"must be {words}, an algorithm, or a mapping, got {shown(value)}")
    reasons: list[str] = []
    good = clean(value, reasons, " ", {**_LAYER_CHECKS, "residency": _one_of(RESIDENCIES)})
    if good.get("residency") in DENSE and len(good) > 1:
        others = ", ".join(key for key in good if key != "residency")
        reasons.append(f" is {good['residency']}, so it takes no {others}")
    if reasons:
        raise Refused(reasons, good)
    return {"residency": "sparse", **good} if "algorithm" in good else good
