"""Arguments of an engine out of a configuration of topkv. Imports neither."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def take_owned(
    settings: dict[str, Any], owned: Mapping[str, str], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Take settings that an engine has names of its own for, for it to decide them.

    Args:
        settings: of topkv; these are removed.
        owned: the engine's names of settings.
        arguments: of the engine, as they were given.

    Returns:
        The engine's arguments: settings, and defaults of topkv where nothing was given.
    """
    from topkv.config.settings import DEFAULTS

    ours = {}
    for name, argument in owned.items():
        value = settings.pop(name, None)
        if value is None:
            value = None if argument in arguments else DEFAULTS[name]
        if value is not None:
            ours[argument] = value
    return ours


def twice_reasons(ours: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[str]:
    """Reasons against arguments that were given and that topkv sets to something else.

    Args:
        ours: what topkv sets.
        arguments: of the engine, as they were given.
    """
    return [
        f"{name} is {ours[name]!r} by the configuration of topkv and {arguments[name]!r} "
        "by the arguments; say it once"
        for name in sorted(ours.keys() & arguments.keys())
        if arguments[name] != ours[name]
    ]
