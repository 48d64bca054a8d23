"""What is wrong with an entry: judged when it is registered, so that nobody has to doubt it later.

Names of kinds, paths, tiers and traits are checked where an entry is made; the rest is here, so
that one wrong entry leaves the others of its package usable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from topkv.entries import SCOPES, Capabilities, PluginEntry
from topkv.messages import shown

Check = tuple[Callable[[Any], bool], str]
"""Whether a value is right, and what it must be."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def reasons(entry: PluginEntry) -> list[str]:
    """Every field of an entry that cannot be what it is."""
    found = _wrong(entry, _ENTRY, "")
    if isinstance(entry.capabilities, Capabilities):
        found += _wrong(entry.capabilities, _CAPABILITIES, "capabilities.")
    unit = entry.defaults.get("unit", 1) if _is_mapping(entry.defaults) else 1
    if type(unit) is not int or abs(unit) >= 2**31:
        # Read without a model to see what goes with what; ``lower`` checks all of them.
        found.append(f"defaults['unit'] must be an int, got {shown(unit)}")
    return found


def _wrong(of: object, checks: Mapping[str, Check], where: str) -> list[str]:
    return [
        f"{where}{name} must be {expected}, got {shown(getattr(of, name))}"
        for name, (is_right, expected) in checks.items()
        if not is_right(getattr(of, name))
    ]


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def is_api(value: Any) -> bool:
    """Whether a value has the form of a hook API."""
    parts = value if isinstance(value, tuple) and len(value) == 2 else ("",)
    return all(type(part) is int and 0 <= part < 2**16 for part in parts)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _is_range(value: Any) -> bool:
    low, high = value if isinstance(value, tuple) and len(value) == 2 else (0, 0)
    return _is_count(low) and _is_count(high) and low <= high


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _words(known: Collection[str] = ()) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        return isinstance(value, tuple) and all(
            isinstance(word, str) and (not known or word in known) for word in value
        )

    return check


def _or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


_FLAG = (_is_flag, "True or False")
_MAPPING = (_is_mapping, "a mapping with names for keys")

_ENTRY: dict[str, Check] = {
    "name": (_is_name, "a str of letters, digits, '_', '-' and '.'"),
    "hook_api": (is_api, "a tuple (major, minor) of ints"),
    "capabilities": (
        lambda value: isinstance(value, Capabilities),
        "a topkv.entries.Capabilities",
    ),
    "defaults": _MAPPING,
    "parameters": _MAPPING,
}

_CAPABILITIES: dict[str, Check] = {
    "units": (_or_none(_is_range), "a tuple of the smallest and the largest unit, or None"),
    "scopes": (
        _or_none(lambda value: _words(SCOPES)(value) and len(value) > 0),
        f"a tuple of one of {', '.join(map(repr, SCOPES))} or both, or None",
    ),
    "attention": (_words(), "a tuple of names"),
    "kv_formats": (_words(), "a tuple of names"),
    "needs_index": _FLAG,
    "dtypes": (_or_none(_words()), "a tuple of names, or None"),
    "head_dims": (
        _or_none(lambda value: isinstance(value, tuple) and all(map(_is_count, value))),
        "a tuple of positive ints, or None",
    ),
    "max_group": (_or_none(_is_count), "a positive int or None"),
    "softcap": _FLAG,
    "lse": _FLAG,
    "capture": _FLAG,
    "host_memory": _FLAG,
    "tiers": (_words(), "a tuple of names"),
    "traits": (_words(), "a tuple of names"),
}
