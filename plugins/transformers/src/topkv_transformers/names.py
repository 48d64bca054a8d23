"""Names that Transformers and topkv use in calls and modules.

Transformers 5.24 has renamed the argument by which a model is handed its cache. Callers may use
either name there: the newer releases accept the older one and rename it within the call, behind
hooks and replaced ``forward`` methods, which therefore see both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.modeling_outputs import BaseModelOutputWithPast

_NAMES = ("cache", "past_key_values")

CACHE = next(name for name in _NAMES if name in BaseModelOutputWithPast.__dataclass_fields__)
"""The name that the installed Transformers uses, for arguments and for outputs."""

HANDLE = "_topkv_handle"
"""Attribute of a decoder that is attached."""


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among arguments by name, None if there is none."""
    return arguments.get(CACHE, next((arguments[n] for n in _NAMES if n in arguments), None))


def with_cache(arguments: Mapping[str, Any], cache: Any) -> dict[str, Any]:
    """Arguments with another cache, by the name that is used now."""
    rest = {name: value for name, value in arguments.items() if name not in _NAMES}
    return {**rest, CACHE: cache}
