"""The conformance suite of stages that stand for an option of attention and refine nothing.

::

    from topkv_testing.stages import AlgorithmOptions, OptionTests


    class TestSkipping(OptionTests):
        @pytest.fixture
        def plugin(self):
            return "skipping"

Of the options ``params`` alone counts. What the option does is for the tests of the package and of
the backends that have it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from topkv.assembly.assembly import Plugins, make_plugins
from topkv.assembly.stages import Staged
from topkv.config import LoweredConfig, SparseConfig, lower
from topkv.errors import ConfigError
from topkv.plugins import PluginRegistry
from topkv.types import ModelShape
from topkv_testing.algorithm.options import options_of
from topkv_testing.kit import KitTests, Subject, drawn
from topkv_testing.models.doubles import GATHER, Entries

_MODEL = ModelShape(3, 4, 2, 64, torch.float32, 0.125)


def _configured(
    subject: Subject, backend: str, params: dict[str, Any]
) -> tuple[LoweredConfig, PluginRegistry]:
    """Layer 0 dense, the stage behind the algorithm of layers 1 and 2."""
    entry = subject.entry
    stated = evolve(GATHER.capabilities, options=entry.capabilities.options)
    able = evolve(GATHER, name="able", capabilities=stated)
    registry = PluginRegistry([("topkv-testing", "0", Entries(entry, able))])
    config = SparseConfig(
        algorithm="scripted",
        backend=backend,
        dense_layers=[0],
        stages=[{"name": entry.name, "params": params}],
        impl=subject.tier.impl,
        max_tokens=1024,
        budget=256,
    )
    return lower(config, _MODEL, device=subject.tier.device, registry=registry), registry


def _made(subject: Subject, params: dict[str, Any]) -> Plugins:
    config, registry = _configured(subject, "able", params)
    return make_plugins(registry, config)


class OptionTests(KitTests):
    """Every test of a stage whose entry names options of attention and which refines nothing."""

    kind = "stage"

    @drawn(cpu=20, interpret=5, gpu=5, params=lambda subject: options_of(subject).params)
    def test_its_parameters_reach_the_backend_of_its_layers(
        self, subject: Subject, params: dict[str, Any]
    ) -> None:
        """All of them, under each option; and none reach that of dense layers."""
        entry = subject.entry
        assert entry.capabilities.options, f"{entry.name} names no option of attention"
        every = entry.parameters(**params)
        made: list[Any] = _made(subject, params).backends
        asked = [dict(each.options) for each in made]
        assert asked == [{}, dict.fromkeys(entry.capabilities.options, every)]

    def test_it_takes_no_part_in_selections(self, subject: Subject) -> None:
        """The algorithm stands alone, so that steps and memory are what they are without it."""
        made = _made(subject, {})
        assert not any(isinstance(each, Staged) for each in made.algorithms), (
            f"{subject.entry.name} stands behind the algorithm: leave refine out"
        )

    def test_a_backend_without_the_option_is_refused_by_name(self, subject: Subject) -> None:
        with pytest.raises(ConfigError) as error:
            _configured(subject, "gather", {})
        (reported,) = error.value.reasons
        for part in (*subject.entry.capabilities.options, subject.entry.name, "'gather'"):
            assert part in reported, reported
