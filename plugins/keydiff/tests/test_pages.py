"""Worth of pages, and the pages that a long answer keeps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plugins.keydiff.tests.test_conformance import ENTRY, by_tokens
from tests.machines.dropping import Lives
from topkv.errors import ConfigError
from topkv_testing.algorithm.bench import AlgorithmBench
from topkv_testing.algorithm.case import Case
from topkv_testing.kit import examples, params_of, subject_of
from topkv_testing.machines.lifecycle_model import KV_HEADS, LAYERS, doubles
from topkv_testing.models.stage_doubles import EVERYTHING
from topkv_testing.stage.keep import worth
from topkv_testing.strategies import Geometry
from topkv_testing.tiers import tier


@pytest.mark.parametrize("scope", ["kv_head", "shared"])
def test_pages_are_worth_what_the_formula_says(scope, on):
    @examples(on, cpu=30, interpret=4, gpu=10)
    @given(data=st.data(), zeros=st.booleans(), size=st.sampled_from([1e-20, 1.0, 1e20]))
    def check(data, zeros, size):
        case = Case(
            Geometry(2, 2, 16, 4, 2, scope, torch.float32),
            {}, 3, 2, "normal", data.draw(st.integers(0, 99)), 12, float("nan"), exact=False,
        )  # fmt: skip
        bench = AlgorithmBench(subject_of(ENTRY, "stage", on), case)
        page = bench.group.page_tokens
        keys = case.tokens(1)[: data.draw(st.integers(2 * page, case.most - 1))] * size
        if zeros:
            keys[3] = 0.0
        bench.prefill(1, keys)
        whole = len(keys) // page * page
        expected = by_tokens(keys[:whole], page, bench.group.lane_heads)
        torch.testing.assert_close(worth(bench, 1).double(), expected, rtol=0, atol=1e-5)

    check()


def test_pages_that_are_unlike_the_others_outlive_a_long_answer():
    """One page of ten of a prompt has keys of its own, and is neither first nor recent."""
    params = {"tokens": 16, "every": 5, "first": 0, "recent": 4}
    stages = [{"name": "keydiff", "params": params}]
    lives = Lives(tier("cpu"), registry=doubles(EVERYTHING, ENTRY), stages=stages)
    coordinator, slot = lives.coordinator, lives.coordinator.request_begin()
    like = torch.tensor([1.0, 0.2, 0.1, 0.0])

    def forward(rows, **how):
        coordinator.forward_begin(**how)
        q = torch.randn(len(rows), 4, 4)
        for layer in range(LAYERS):
            coordinator.attention(layer, q, rows, rows)
        coordinator.forward_end()

    prompt = (like + 0.1 * torch.randn(40, KV_HEADS, 4)).contiguous()
    prompt[20:24] = -prompt[20:24]
    forward(prompt, prefill=[(slot, 40)])
    page = coordinator.requests.pages.of(slot)[5]
    for _ in range(60):
        forward(like + 0.1 * torch.randn(1, KV_HEADS, 4), decode=[slot])
        assert page in coordinator.requests.pages.of(slot)
        assert coordinator.manager.host.used <= 6
    assert coordinator.requests.dropped[slot] >= 40 + 60 - 21
    coordinator.close()


def test_wrong_parameters_are_refused_together():
    params = {"tokens": 0, "every": True, "first": -1, "recent": 1.5}
    with pytest.raises(ConfigError) as caught:
        params_of(ENTRY, params)
    assert [*caught.value.reasons] == [
        "parameter tokens of keydiff must be >= 1, got 0",
        "parameter every of keydiff must be an int, got True",
        "parameter first of keydiff must be >= 0, got -1",
        "parameter recent of keydiff must be an int, got 1.5",
    ]
