"""Plugins that a configuration names are looked up without a model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from topkv import hookimpl
from topkv.config import SparseConfig
from topkv.entries import PluginEntry
from topkv.errors import ConfigError
from topkv.plugins import PluginRegistry
from topkv_cli.named import require_plugins

BACKEND = SimpleNamespace(
    topkv_register_backends=hookimpl(lambda: [PluginEntry("there", "backend", "a:b")])
)
NAMED = {
    "algorithm": "one",
    "eviction": "two",
    "topk": "three",
    "transfer": "four",
    "stages": ["five", {"name": "six", "params": {"a": 1}}],
    "observers": ["seven"],
    "pages": {"name": "eight"},
    "layers": {"0-1": "resident", "2": "nine", "3-": {"stages": ["ten"], "algorithm": "eleven"}},
}


def reasons_of(registry, **settings):
    with pytest.raises(ConfigError) as refused:
        require_plugins(SparseConfig(**settings), registry)
    return refused.value.reasons


def test_every_plugin_that_is_named_is_looked_up():
    registry = PluginRegistry([("topkv-there", "1", BACKEND)])
    require_plugins(SparseConfig(eviction="lru"), registry)
    reported = reasons_of(registry, **NAMED)
    words = [
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
    ]
    for word in words:
        assert sum("unknown" in each and f"{word!r}:" in each for each in reported) == 1, word
    assert len(reported) == len(words)


def test_a_backend_that_has_to_be_chosen_is_missed():
    (reported,) = reasons_of(PluginRegistry([]))
    assert "backend is not set and none is installed" in reported


def test_wrong_values_are_reported_beside_unknown_names():
    registry = PluginRegistry([("topkv-there", "1", BACKEND)])
    reported = reasons_of(registry, budget="many", algorithm="one", layers={"0-x": "resident"})
    assert len(reported) == 3
    assert any("budget must be" in each for each in reported)
    require_plugins(SparseConfig(budget="many"), registry)  # for ``lower`` to refuse
