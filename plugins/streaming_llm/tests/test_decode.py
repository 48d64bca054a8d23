"""Whole decodes through the coordinator against dense attention under a mask, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from topkv.config import SparseConfig, lower
from topkv.coordinator import SparseCoordinator
from topkv.errors import ConfigError
from topkv.hooks.algorithm import AlgorithmSetup
from topkv.plugins import PluginRegistry
from topkv.types import ModelShape
from topkv_streaming_llm.entry import topkv_register_algorithms
from topkv_testing.doubles import Entries
from topkv_testing.kit import params_of
from topkv_testing.oracle import attention
from topkv_testing.tiers import all_tiers
from topkv_testing.tolerance import assert_as_good

HEADS, KV_HEADS, DIM, MOST = 4, 2, 8, 64
MODEL = ModelShape(1, HEADS, KV_HEADS, DIM, torch.float32, DIM**-0.5)
REGISTRY = PluginRegistry([("test", "1", Entries(*topkv_register_algorithms()))])


@pytest.fixture(
    params=[
        pytest.param(tier, id=tier.name, marks=[pytest.mark.gpu] if tier.name == "gpu" else [])
        for tier in all_tiers()
        # The conformance suite pins the interpreted kernel to the exact slice; whole decodes under
        # the interpreter take minutes.
        if tier.name != "interpret"
    ]
)
def tier(request):
    if request.param.missing:
        pytest.skip(request.param.missing)
    return request.param


def make(tier, unit, budget, sinks, scope):
    config = SparseConfig(
        algorithm="streaming_llm",
        params={"sink_tokens": sinks},
        backend="gather",
        impl=tier.impl,
        unit=unit,
        scope=scope,
        budget=budget,
        ring_tokens=2 * unit,
        page_tokens=16,
        max_requests=2,
        max_tokens=2 * MOST,
        max_request_tokens=MOST,
        prefill_block_tokens=16,
        poison=True,
    )
    return SparseCoordinator(lower(config, MODEL, device=tier.device, registry=REGISTRY), REGISTRY)


def attended(length, unit, budget, sinks):
    """The tokens that a step of this length may see: sinks, window, and nothing else."""
    closed = (length - 1) // unit
    select = min(budget // unit - 1, MOST // unit)
    first = -(-sinks // unit)
    units = list(range(closed))
    if closed > select:
        units = units[:first] + units[closed - (select - first) :]
    tokens = [unit * u + i for u in units for i in range(unit)]
    return tokens + list(range(closed * unit, length))


class Stream:
    """One request and what was given to it, on the CPU."""

    def __init__(self, tier, shape, seed, nan=()):
        self.coordinator = make(tier, *shape)
        self.device, self.slot = tier.device, self.coordinator.request_begin()
        generator = torch.Generator().manual_seed(seed)
        self.q = torch.randn(MOST, HEADS, DIM, generator=generator)
        self.k, self.v = torch.randn(2, MOST, KV_HEADS, DIM, generator=generator)
        for x in (self.k, self.v):
            x[list(nan)] = math.nan
        self.length = 0

    def _run(self, count):
        rows = slice(self.length, self.length + count)
        tensors = [x[rows].to(self.device) for x in (self.q, self.k, self.v)]
        out = torch.full_like(tensors[0], math.nan)
        self.coordinator.attention(0, *tensors, out=out)
        self.length += count
        return out.cpu()

    def prefill(self, count):
        self.coordinator.forward_begin(prefill=[(self.slot, count)])
        self._run(count)
        self.coordinator.forward_end()

    def decode(self):
        """Output ``[1, H, D]`` of a step, and the tokens that each lane attended."""
        self.coordinator.forward_begin([self.slot])
        out = self._run(1)
        tokens = self.coordinator.lanes[0].tables.lengths.tolist()
        self.coordinator.forward_end()
        return out, tokens

    def check(self, out, tokens):
        """Compare with attention over the listed tokens."""
        last = slice(self.length - 1, self.length)
        given = (self.q[last], self.k[tokens], self.v[tokens], MODEL.scale)
        rough = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in given[:3]), scale=MODEL.scale, enable_gqa=True
        )
        assert_as_good(out, attention(*given)[0], rough[0].transpose(0, 1), f"step {self.length}")


@st.composite
def shapes(draw):
    """unit, budget, sink_tokens, scope."""
    unit = draw(st.sampled_from([1, 2, 8]))
    select = draw(st.integers(1, 5))
    sinks = draw(st.integers(0, min(select * unit, 4)))
    return unit, (select + 1) * unit, sinks, draw(st.sampled_from(["shared", "kv_head"]))


def test_decode_is_dense_attention_under_a_lambda_mask(tier):
    """Tokens outside of the mask, NaN in keys and values, are never touched."""

    @settings(max_examples=40)
    @given(
        shape=shapes(),
        prompt=st.integers(1, 50),
        steps=st.integers(1, 12),
        seed=st.integers(0, 99),
    )
    def check(shape, prompt, steps, seed):
        seen = [attended(n, *shape[:3]) for n in range(prompt + 1, prompt + steps + 1)]
        dropped = set(range(prompt)).difference(*seen)
        stream = Stream(tier, shape, seed, nan=dropped)
        stream.prefill(prompt)
        for tokens in seen:
            out, counts = stream.decode()
            assert set(counts) == {len(tokens)}
            assert len(tokens) <= shape[1]
            assert len(tokens) > min(stream.length, shape[1]) - shape[0]
            stream.check(out, tokens)

    check()


def test_within_the_budget_it_is_dense(tier):
    """Sinks and window reach each other: every token is attended, in the step at the edge too."""

    @settings(max_examples=20)
    @given(shape=shapes(), seed=st.integers(0, 99))
    def check(shape, seed):
        stream = Stream(tier, shape, seed)
        stream.prefill(1)
        while stream.length < shape[1]:
            stream.check(stream.decode()[0], range(stream.length))

    check()


def test_a_prompt_in_chunks_ends_like_one_decoded_token_by_token(tier):
    @settings(max_examples=15)
    @given(shape=shapes(), seed=st.integers(0, 99), cuts=st.lists(st.integers(1, 17), max_size=3))
    def check(shape, seed, cuts):
        chunks, steps = (Stream(tier, shape, seed) for _ in range(2))
        for count in [*cuts, 1]:
            chunks.prefill(count)
        steps.prefill(1)
        while steps.length < chunks.length:
            steps.decode()
        for _ in range(3):
            (one, counts), (two, same) = chunks.decode(), steps.decode()
            assert torch.equal(one, two)
            assert counts == same

    check()


def test_values_that_do_not_fit_are_refused_together():
    group = make(all_tiers()[0], 2, 8, 4, "shared").layers[0].view.group

    def made(impl, params):
        given = params_of(topkv_register_algorithms()[0], params)
        # Refused before it asks for a top-k.
        setup = AlgorithmSetup(MODEL, group, given, torch.device("cpu"), topk=pytest.fail)
        REGISTRY.create("algorithm", "streaming_llm", setup, impl)

    def refused(impl, **params):
        with pytest.raises(ConfigError, match="sink_tokens") as raised:
            made(impl, params)
        return raised.value.reasons

    for impl in ("reference", "triton"):
        assert len(refused(impl, sink_tokens=-1, reposition=True)) == 2
        for sinks in (True, 1.5, 7):
            assert len(refused(impl, sink_tokens=sinks)) == 1
