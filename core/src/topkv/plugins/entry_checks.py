"""Checks of every field of an entry, made when it is registered.

Nobody has to doubt an entry later, and a wrong one leaves the others of its package usable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from topkv.entries import IMPLS, SCOPES, TIERS, TRAITS, Capabilities, PluginEntry
from topkv.messages import shown
from topkv.parameters import class_reasons

Test = Callable[[Any], bool]
Check = tuple[Test, str]
"""A test of a value, and the text of what it must be."""


def reasons(entry: PluginEntry, kind: str, hook: str) -> list[str]:
    """Reasons against an entry that the hook of a kind returned, one for each wrong field."""
    found = _wrong(entry, _ENTRY, "")
    found += [f"parameters {reason}" for reason in class_reasons(entry.parameters)]
    if entry.kind != kind:
        found.append(f"{hook} must return entries of kind {kind!r}, got {shown(entry.kind)}")
    if isinstance(entry.capabilities, Capabilities):
        found += _wrong(entry.capabilities, _CAPABILITIES, "capabilities.")
    unit = entry.defaults.get("unit", 1) if _is_mapping(entry.defaults) else 1
    if type(unit) is not int or abs(unit) >= 2**31:
        # Read without a model, to see which plugins fit together; ``lower`` checks all of them.
        found.append(f"defaults['unit'] must be an int, got {shown(unit)}")
    return found


def _wrong(of: object, checks: Mapping[str, Check], where: str) -> list[str]:
    return [
        f"{where}{name} must be {expected}, got {shown(getattr(of, name))}"
        for name, (is_right, expected) in checks.items()
        if not is_right(getattr(of, name))
    ]


def _is(cls: type) -> Test:
    return lambda value: isinstance(value, cls)


def _matches(pattern: str) -> Test:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _one_of(known: Collection[str]) -> Test:
    return lambda value: isinstance(value, str) and value in known


def _tuple_of(test: Test, least: int = 0) -> Test:
    return lambda value: isinstance(value, tuple) and len(value) >= least and all(map(test, value))


def _some_of(known: Collection[str], least: int = 0) -> Check:
    names = ", ".join(map(repr, known))
    expected = f"a tuple of {'one or more' if least else 'any'} of {names}"
    return _tuple_of(_one_of(known), least), expected


is_name = _matches("[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_is_place = _matches(r"[\w.]+:\w+")


def is_api(value: Any) -> bool:
    """Return True if a value has the form of a hook API."""
    parts = value if isinstance(value, tuple) and len(value) == 2 else ("",)
    return all(type(part) is int and 0 <= part < 2**16 for part in parts)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _are_factories(value: Any) -> bool:
    known = isinstance(value, Mapping) and len(value) > 0 and all(map(_one_of(IMPLS), value))
    return known and all(map(_is_place, value.values()))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _is_range(value: Any) -> bool:
    low, high = value if isinstance(value, tuple) and len(value) == 2 else (0, 0)
    return _is_count(low) and _is_count(high) and low <= high


def _or_none(check: Check) -> Check:
    test, expected = check
    return lambda value: value is None or test(value), f"{expected}, or None"


_IMPLS = " or ".join(map(repr, IMPLS))
_FLAG = (_is(bool), "True or False")
_MAPPING = (_is_mapping, "a mapping with names for keys")
_NAMES = (_tuple_of(_is(str)), "a tuple of names")

_ENTRY: dict[str, Check] = {
    "name": (is_name, "a str of letters, digits, '_', '-' and '.'"),
    "factories": (_are_factories, f"'module:attribute', or map {_IMPLS} to that"),
    "hook_api": (is_api, "a tuple (major, minor) of ints"),
    "capabilities": (_is(Capabilities), "a topkv.entries.Capabilities"),
    "defaults": _MAPPING,
    "doctor": _or_none((_is_place, "'module:function'")),
}

_CAPABILITIES: dict[str, Check] = {
    "units": _or_none((_is_range, "a tuple of the smallest and the largest unit")),
    "scopes": _or_none(_some_of(SCOPES, least=1)),
    "attention": _NAMES,
    "kv_formats": _NAMES,
    "host_formats": _or_none(_NAMES),
    "tail": (_one_of(("forced", "selectable")), "'forced' or 'selectable'"),
    "options": _NAMES,
    "dtypes": _or_none(_NAMES),
    "head_dims": _or_none((_tuple_of(_is_count), "a tuple of positive ints")),
    "max_group": _or_none((_is_count, "a positive int")),
    "queries": _or_none((_is_count, "a positive int")),
    "tiers": _some_of(TIERS),
    "traits": _some_of(TRAITS),
    **dict.fromkeys(("needs_index", "softcap", "capture", "host_memory"), _FLAG),
}
