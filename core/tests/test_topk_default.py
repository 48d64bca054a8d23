"""The exact top-k of a configuration whose user names none."""

from __future__ import annotations

import pytest
import torch

from topkv import hookimpl
from topkv.config import SparseConfig, lower
from topkv.entries import Capabilities, PluginEntry
from topkv.errors import ConfigError
from topkv.plugins import PluginRegistry
from topkv.plugins.builtin import topkv_register_topks
from topkv.types import ModelShape

MODEL = ModelShape(4, 8, 2, 64, torch.bfloat16, 0.125)
(OWN,) = (entry.name for entry in topkv_register_topks())
STATED = {"units": None, "tokens": "fast", "others": "other"}
"""The top-k that each algorithm states."""


class Entries:
    """Three algorithms, a backend and two top-ks; nothing here imports their factories."""

    def __init__(self, topks):
        self.topks = topks

    @hookimpl
    def topkv_register_algorithms(self):
        defaults = {name: {"topk": topk} if topk else {} for name, topk in STATED.items()}
        return [
            PluginEntry(name, "algorithm", "x:Y", capabilities=Capabilities(), defaults=stated)
            for name, stated in defaults.items()
        ]

    @hookimpl
    def topkv_register_backends(self):
        return [PluginEntry("reads", "backend", "x:Y")]

    @hookimpl
    def topkv_register_topks(self):
        return [PluginEntry(name, "topk", "x:Y") for name in self.topks]


def low(topks=("fast", "other"), checkpoint=None, **options):
    config = SparseConfig(**{"dense_layers": [], "max_tokens": 1024, **options})
    registry = PluginRegistry([("topkv-fake", "0.3", Entries(topks))])
    return lower(
        config, MODEL, device=torch.device("cpu"), registry=registry, checkpoint=checkpoint
    )


def chosen(**options):
    """Return the name of the top-k, and its origin."""
    lowered = low(**options)
    (setting,) = (each for each in lowered.settings if each.name == "topk")
    assert setting.value == lowered.topk
    return lowered.topk, setting.origin


def layers(**algorithms):
    return {"layers": {key[1:]: {"algorithm": name} for key, name in algorithms.items()}}


PLUGIN = "topkv-fake 0.3"
CASES = {
    "the core's own": ({"algorithm": "units"}, (OWN, "topkv default")),
    "the algorithm's": ({"algorithm": "tokens"}, ("fast", PLUGIN)),
    "of an override": ({"algorithm": "units", **layers(_2="tokens")}, ("fast", PLUGIN)),
    "the base's before": ({"algorithm": "others", **layers(_0="tokens")}, ("other", PLUGIN)),
    "no base": (layers(**{"_0-1": "others", "_2-3": "tokens"}), ("other", PLUGIN)),
    "no base, the first": (layers(**{"_0-1": "units", "_2-3": "tokens"}), ("fast", PLUGIN)),
    "a dense layer's": (
        {
            "algorithm": "units",
            "layers": {"1": {"algorithm": "tokens"}, "1-2": {"residency": "resident"}},
        },
        (OWN, "topkv default"),
    ),
    "the user's": (
        {"algorithm": "tokens", "topk": "other", **layers(_2="others")},
        ("other", "user"),
    ),
    "the checkpoint's": (
        {"algorithm": "units", "checkpoint": {"topk": "other"}, **layers(_2="tokens")},
        ("other", "checkpoint"),
    ),
}


@pytest.mark.parametrize(("options", "expected"), CASES.values(), ids=CASES)
def test_one_is_chosen_for_all_layers(options, expected):
    assert chosen(**options) == expected


@pytest.mark.parametrize("options", [{"algorithm": "tokens"}, layers(**{"_0-3": "tokens"})])
def test_one_that_is_not_installed_is_refused_by_whose_default_it_is(options):
    with pytest.raises(ConfigError) as caught:
        low(topks=(), **options)
    unknown, whose = caught.value.reasons
    assert "unknown topk 'fast'" in unknown
    assert f"installed of kind topk: {OWN}" in unknown
    assert f"{PLUGIN} asks for topk 'fast'" in whose
    assert "set topk" in whose


def test_one_that_the_user_names_is_refused_without_blame():
    with pytest.raises(ConfigError) as caught:
        low(topks=(), algorithm="tokens", topk="nobody")
    (reported,) = caught.value.reasons
    assert "unknown topk 'nobody'" in reported
    assert PLUGIN not in reported
