"""``correct``: units that were not attended are added, by a stage or by the algorithm itself."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from topkv.assembly.stages import Stages
from topkv.errors import ConfigError, PluginError
from topkv.hooks.stage import StageSpec
from topkv.plugins.discovery import hookimpl
from topkv_testing.integrity import check_integrity
from topkv_testing.machines.lifecycle_model import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    SPARSE,
    doubles,
    make_coordinator,
)
from topkv_testing.models.doubles import SCRIPTED, Scripted
from topkv_testing.models.oracle import attention
from topkv_testing.models.stage_doubles import COMPLETE, KEEP, RERANK, Complete, Keep
from topkv_testing.stages import AlgorithmOptions, StageTests
from topkv_testing.tiers import tier

UNIT, PROMPT = 2, 21
SCALE = DIM**-0.5


class TestComplete(StageTests):
    """A correction that is exact, under a name of its own."""

    @pytest.fixture
    def plugin(self):
        return evolve(COMPLETE, name="completes")

    @pytest.fixture
    def options(self):
        return AlgorithmOptions()


class Life:
    """One request of a coordinator, whose algorithm selects at random."""

    def __init__(self, **options):
        options = {"registry": doubles(COMPLETE)} | options
        self.coordinator = make_coordinator(tier("cpu"), **options)
        self.generator = torch.Generator().manual_seed(5)
        self.keys = self.values = torch.empty(LAYERS, 0, KV_HEADS, DIM)
        self.slot = self.coordinator.request_begin()

    def scripted(self, layer):
        algorithm = self.coordinator.layers[layer].algorithm
        return getattr(algorithm, "algorithm", algorithm)

    def prompt(self, count):
        rows = self.rows(count)
        self.coordinator.forward_begin(prefill=[(self.slot, count)])
        for layer in range(LAYERS):
            self.coordinator.attention(layer, *(each[layer] for each in rows))
        self.coordinator.forward_end()

    def rows(self, count):
        q, k, v = (
            torch.randn(LAYERS, count, n, DIM, generator=self.generator)
            for n in (HEADS, KV_HEADS, KV_HEADS)
        )
        self.keys, self.values = torch.cat([self.keys, k], 1), torch.cat([self.values, v], 1)
        return q, k, v

    def step(self, sinks=None):
        """Decode over random units, beside a padded row; return outputs and truth by layer."""
        c, found = self.coordinator, {}
        c.settle([self.slot])  # warms by what is selected without next_ids
        rows = self.rows(1)
        closed = (self.keys.shape[1] - 1) // UNIT
        for layer in SPARSE:
            lanes = c.layers[layer].lanes.group
            ids = torch.full((lanes.lane_heads, lanes.select), -1, dtype=torch.int32)
            for lane in ids:
                units = torch.randperm(closed, generator=self.generator)[: lanes.select - 1]
                lane[1 : 1 + len(units)] = units.int()
            pad = torch.full_like(ids, -1)
            self.scripted(layer).next_ids[layer] = torch.cat([ids, pad])
        c.forward_begin(decode=[self.slot, -1])
        for layer in range(LAYERS):
            q, k, v = (each[layer].repeat(2, 1, 1) for each in rows)
            out = c.attention(layer, q, k, v, sinks=sinks)
            truth, lse = attention(q[:1], self.keys[layer], self.values[layer], SCALE)
            if sinks is not None:
                truth *= (lse - sinks).sigmoid()[..., None]
            found[layer] = out[:1], truth
        c.forward_end()
        for layer in SPARSE:
            self.scripted(layer).next_ids.clear()
        return found


def check(life, sinks=None):
    for layer, (out, truth) in life.step(sinks).items():
        torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-5, msg=f"layer {layer}")


@pytest.mark.parametrize("scope", ["kv_head", "shared"])
@pytest.mark.parametrize("stages", [["complete"], ["keep", "complete"], ["complete", "keep"]])
def test_with_an_exact_correction_any_selection_gives_attention_to_all(scope, stages):
    """Outputs stay exact through decode, a fork, truncation, and a second prompt."""
    life = Life(scope=scope, stages=stages)
    life.prompt(PROMPT)
    for _ in range(5):
        check(life)
    twin, kept = life.coordinator.fork(life.slot), (life.keys, life.values)
    check(life)
    life.slot, (life.keys, life.values) = twin, kept
    check(life)
    life.coordinator.truncate(twin, 14)
    life.keys, life.values = life.keys[:, :14], life.values[:, :14]
    check(life)
    life.prompt(7)
    for _ in range(3):
        check(life)
    check_integrity(life.coordinator)
    life.coordinator.close()


def test_it_is_corrected_before_sinks_take_their_share():
    life = Life(stages=["complete"])
    life.prompt(PROMPT)
    for _ in range(3):
        check(life, sinks=torch.linspace(-1, 3, HEADS))
    life.coordinator.close()


def test_without_it_the_selection_alone_is_attended():
    life = Life()
    life.prompt(PROMPT)
    wrong = [(out - truth).abs().max() for out, truth in life.step().values()]
    assert max(wrong) > 0.01
    life.coordinator.close()


class OwnCorrection(Scripted):
    """Doubles the output of attention, which shows in every element."""

    @hookimpl
    def correct(self, layer, q, selection, out, lse):
        out.mul_(2)


def test_an_algorithm_may_correct_itself_and_then_no_stage_does():
    entry = evolve(SCRIPTED, name="own", factories=f"{__name__}:OwnCorrection")
    outs = []
    for algorithm, stages in (("scripted", []), ("own", []), ("own", ["keep"])):
        life = Life(registry=doubles(entry, COMPLETE), algorithm=algorithm, stages=stages)
        life.prompt(PROMPT)
        outs.append({layer: out.clone() for layer, (out, _) in life.step().items()})
        life.coordinator.close()
    for layer, out in outs[0].items():
        times = 2 if layer in SPARSE else 1
        assert torch.equal(outs[1][layer], times * out)
        assert torch.equal(outs[2][layer], times * out)
    with pytest.raises(ConfigError, match="corrected for more than once, by the stages \\[-1, 1"):
        Life(registry=doubles(entry, COMPLETE), algorithm="own", stages=["keep", "complete"])


TOKENS_ALONE = evolve(
    SCRIPTED, name="tokens", capabilities=evolve(SCRIPTED.capabilities, units=(1, 1))
)


def test_it_is_refused_where_single_tokens_of_units_are_selected():
    with pytest.raises(ConfigError, match="selects single tokens of units"):
        Life(
            registry=doubles(TOKENS_ALONE, COMPLETE),
            algorithm="tokens",
            buffer=16,
            stages=["complete", "to_units"],
        )


class Idle(Keep):
    refine = None


class Wide(Complete):
    @hookimpl
    def spec(self):
        return StageSpec(widen=2)


@pytest.mark.parametrize(
    ("stage", "reported"),
    [(Idle, "none of refine, correct, bind"), (Wide, "widen=2, and it has no refine; say 1")],
)
def test_stages_that_cannot_mean_what_they_say_are_refused(stage, reported):
    coordinator = make_coordinator(tier("cpu"), registry=doubles(KEEP, RERANK))
    group = coordinator.manager.groups[0]
    made = Stages(group, torch.device("cpu"))
    instance = stage.__new__(stage)
    instance.model, instance.group = coordinator.model, group
    with pytest.raises(PluginError, match=reported):
        made.put_first(instance, 0)
    coordinator.close()
