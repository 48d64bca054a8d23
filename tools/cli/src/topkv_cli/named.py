"""Plugins that a configuration names, looked up before there is a model to lower it for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from topkv.checks import clean
from topkv.config.settings import CHECKS, SparseConfig
from topkv.config.sources import Resolver, with_origin
from topkv.config.stages import Named
from topkv.errors import CONFIG_REFUSED, ConfigError
from topkv.plugins import PluginRegistry

SINGLE = ("algorithm", "backend", "transfer", "eviction", "topk", "kv_format", "host_format")
"""Kinds whose setting is the name of one plugin."""


def require_plugins(config: SparseConfig, registry: PluginRegistry) -> None:
    """Refuse a configuration whose plugins cannot be had: commands do so before they load a
    model, which may take minutes.

    Args:
        config: what the user set.
        registry: where plugins are looked up.

    Raises:
        ConfigError: a plugin that is named, or has to be chosen, is not there; with all of them,
            and with every value that is wrong. Wrong values alone are for ``lower`` to refuse,
            which knows more about them.
    """
    reasons: list[str] = []
    values = clean(config.as_dict(), CHECKS, reasons)
    wrong = len(reasons)
    known = Resolver(registry, reasons, with_origin("user", values))
    known.choose("backend")
    for kind, name in _named(values):
        known.plugin(kind, name)
    if len(reasons) > wrong:
        raise ConfigError(CONFIG_REFUSED, dict.fromkeys(reasons))


def _named(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Kinds and names in the checked values of a configuration, or of an override of layers."""
    yield from ((kind, values[kind]) for kind in SINGLE if kind in values)
    yield from (("stage", stage.name) for stage in values.get("stages", ()))
    yield from (("observer", each.name) for each in values.get("observers", ()))
    if isinstance(values.get("pages"), Named):
        yield "keeper", values["pages"].name
    for override in values.get("layers", ()):
        yield from _named(override.values)
