"""Checks of values: each gives back the value in its lowered form, or raises ValueError with what
it must be."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from topkv.messages import close, shown

MOST = 2**31 - 1
"""Upper bound of every count: tensors of ids are int32."""

MOST_BYTES = 2**63 - 1
MOST_LAYERS = 2**16

Check = Callable[[Any], Any]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class Refused(ValueError):
    """Parts of a value are wrong.

    Attributes:
        reasons: each continues the key of the value: ``"[5] unit must be ..."``.
        good: the value without those parts.
    """

    def __init__(self, reasons: Sequence[str], good: Any) -> None:
        super().__init__("; ".join(reasons))
        self.reasons, self.good = tuple(reasons), good


def need(right: bool, expected: str, value: Any) -> None:
    """Raise ValueError unless a value is right; the text says what is expected and given."""
    if not right:
        raise ValueError(f"must {expected}, got {shown(value)}")


def count(value: Any) -> int:
    need(type(value) is int and value > 0, "be a positive int", value)
    need(value <= MOST, f"be at most {MOST}", value)
    return int(value)


def must(be: str, right: Callable[[Any], bool]) -> Check:
    """A check of a value that stays as it is."""

    def check(value: Any) -> Any:
        need(right(value), f"be {be}", value)
        return value

    return check


def one_of(choices: tuple[str, ...]) -> Check:
    words = ", ".join(map(repr, choices))
    return must(f"one of {words}", lambda value: isinstance(value, str) and value in choices)


pattern = must(
    "a text of F and S that begins with F, such as 'FSSS'",
    lambda value: isinstance(value, str) and value[:1] == "F" and set(value) <= {"F", "S"},
)
size = must("an int from 0 on", lambda value: type(value) is int and 0 <= value <= MOST)
flag = must("true or false", lambda value: isinstance(value, bool))
plugin = must("the name of a plugin", lambda value: isinstance(value, str) and value != "")


def parameters(value: Any) -> dict[str, Any]:
    named = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    need(named, "map names of parameters to values", value)
    return dict(value)


def layer_numbers(value: Any) -> tuple[int, ...]:
    known = isinstance(value, (list, tuple, range, set, frozenset))
    layers = list(islice(value, MOST_LAYERS + 1)) if known else []
    need(len(layers) <= MOST_LAYERS, f"be a list of at most {MOST_LAYERS} layers", value)
    right = known and all(type(layer) is int and 0 <= layer <= MOST for layer in layers)
    need(right, "be a list of layer numbers from 0", value)
    return tuple(sorted(set(layers)))


def byte_size(value: Any) -> int:
    """Bytes of an int or of a text such as ``"64GiB"`` (1024) or ``"64GB"`` (1000)."""
    size = value if type(value) is int else _text_size(value)
    need(size > 0, "be a positive number of bytes or a size like '64GiB'", value)
    need(size <= MOST_BYTES, f"be at most {MOST_BYTES} bytes", value)
    return int(size)


def _text_size(value: Any) -> float:
    """Bytes that a text names, a float because it may name any number; 0 if it names none."""
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return 0
    prefix = (match[2] or "").lower()
    power: int = (1024 if prefix.endswith("i") else 1000) ** _POWER[prefix[:1]]
    return float(match[1]) * power


def near(name: object, known: Iterable[str]) -> str:
    """The known names that are close to ``name``; all of them if none is."""
    known = sorted(known)
    return close(name, known) or f"known: {', '.join(known) or 'none'}"


def clean(
    values: Mapping[Any, Any], checks: Mapping[str, Check], reasons: list[str], where: str = ""
) -> dict[str, Any]:
    """Return the values that are right, in lowered form; reasons against others go to ``reasons``.

    Args:
        values: by key; None counts as not set.
        checks: the keys there are.
        reasons: gets one text for each value that is refused.
        where: stands before each reason.
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
