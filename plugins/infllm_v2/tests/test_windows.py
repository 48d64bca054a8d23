"""Compressed keys and what blocks are worth, beside the formula in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import max_pool1d

from topkv.errors import ConfigError
from topkv_infllm_v2 import reference
from topkv_testing.algorithm.bench import AlgorithmBench
from topkv_testing.algorithm.case import Case
from topkv_testing.differences import require_same
from topkv_testing.fixtures import on as on
from topkv_testing.kit import subject_of
from topkv_testing.strategies import Geometry
from topkv_testing.tiers import all_tiers


def bench_of(on, unit, stride, seed=0, dim=64, scope="kv_head", dtype=torch.float32, impl=None):
    """A request of up to 12 units, in pages of two."""
    case = Case(
        geometry=Geometry(2, 2, dim, unit, 2, scope, dtype),
        params={"stride": stride, "sink_units": 0},
        select=3,
        ring=2,
        keys="normal",
        seed=seed,
        least_units=12,
        stale=math.nan,
        exact=False,
    )
    more = {} if impl is None else {"impl": impl}
    return case, AlgorithmBench(subject_of("infllm_v2", "algorithm", on), case, **more)


def worth(keys, q, unit, stride, lane_heads, scale):
    """float64 ``[lane_heads, closed units]``: the log of what the paper's formula gives.

    Args:
        keys: ``[n, Hkv, D]`` of all tokens but the newest.
        q: ``[H, D]``.
    """
    keys, q = keys.double(), q.double().unflatten(0, (keys.shape[1], -1))
    whole, units = len(keys) // stride, len(keys) // unit
    windows = [keys[w * stride : min(w + 2, whole) * stride].mean(0) for w in range(whole)]
    logits = torch.einsum("hgd,whd->hgw", q, torch.stack(windows)) * scale
    shares = logits.softmax(-1).flatten(0, 1).unflatten(0, (lane_heads, -1)).sum(1)
    first = unit // stride
    best = [
        torch.stack([shares[:, w] for w in range(whole) if first * u - 1 <= w < first * (u + 1)])
        for u in range(units)
    ]
    return torch.stack([each.amax(0) for each in best], 1).log()


def check_scores(on):
    """Check scores of prompts and of steps behind them, by every stride and length."""

    @settings(deadline=None, max_examples=40 if on.impl == "reference" else 8)
    @given(
        sizes=st.sampled_from([(4, 1), (4, 2), (8, 2), (8, 8), (6, 3)]),
        share=st.floats(0, 1),
        steps=st.integers(1, 9),
        scope=st.sampled_from(["kv_head", "shared"]),
        seed=st.integers(0, 99),
    )
    def check(sizes, share, steps, scope, seed):
        unit, stride = sizes
        case, bench = bench_of(on, unit, stride, seed, scope=scope)
        most = case.most - steps
        tokens = unit + round(share * (most - unit))
        keys = case.tokens(1)
        bench.prefill(1, keys[:tokens])
        for step in range(steps):
            bench.append([1], keys[tokens + step : tokens + step + 1])
        length = tokens + steps
        q = torch.randn((1, 4, 64), generator=torch.Generator().manual_seed(seed))
        bench._set_rows([1])
        scores, closed = bench.algorithm.lane_scores(bench.layer, q.to(on.device))
        expected = worth(
            keys[: length - 1], q[0], unit, stride, bench.group.lane_heads, bench.model.scale
        )
        assert closed.tolist() == [expected.shape[1]] * len(expected)
        found = scores[:, : expected.shape[1]].cpu().double()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    check()


def test_scores_are_those_of_the_formula(on):
    check_scores(on)


def test_pooling_is_that_of_the_model():
    """MiniCPM4's: the maximum of five windows, four apart, one of them before the block."""
    shares = torch.rand((2, 3, 40), generator=torch.Generator().manual_seed(0))
    theirs = max_pool1d(shares, kernel_size=5, stride=4, padding=1)
    torch.testing.assert_close(reference.unit_scores(shares, 4), theirs)


def test_a_window_of_two_parts_is_the_mean_of_its_keys():
    keys = torch.randn((3, 64, 2, 16), generator=torch.Generator().manual_seed(0))
    means = reference.part_means(keys, torch.ones(3, 64, dtype=torch.bool), 16)
    halves = means.transpose(1, 2).flatten(0, 1)
    windows = (halves[:-1] + halves[1:]) / 2
    rows = keys.flatten(0, 1)
    expected = torch.stack([rows[16 * w : 16 * w + 32].mean(0) for w in range(11)])
    torch.testing.assert_close(windows, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_write_what_the_reference_writes(on, dtype):
    """Values are equal up to the order of a sum."""
    if on.impl == "reference":
        pytest.skip("has no kernels")
    stored = []
    for impl in ("reference", "triton"):
        case, bench = bench_of(on, 8, 4, dim=24, dtype=dtype, impl=impl)
        keys = case.tokens(1)
        bench.prefill(1, keys[:19])
        for token in range(19, 22):
            bench.append([1], keys[token : token + 1])
        stored.append({name: rows.float() for name, rows in bench.stored(1).items()})
    band = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-6}[dtype]
    torch.testing.assert_close(stored[1]["means"], stored[0]["means"], rtol=band, atol=band)
    assert (stored[1]["means"][-1, :, 1, 0] != 0).any()


def check_writing(on):
    stored = []
    for prompt in (1, 30):
        case, bench = bench_of(on, 8, 4)
        keys = case.tokens(1)
        bench.prefill(1, keys[:prompt])
        for token in range(prompt, 30):
            bench.append([1], keys[token : token + 1])
        stored.append(bench.stored(1))
    require_same(stored[1], stored[0], "means")


def test_a_mean_is_the_same_token_by_token_and_at_once(on):
    check_writing(on)


def test_a_key_is_found_with_room_for_two():
    """The key's unit is selected, maybe with the one before, which shares a window with it."""
    (on,) = (each for each in all_tiers() if each.name == "cpu")

    @settings(deadline=None, max_examples=30)
    @given(unit=st.integers(0, 10), offset=st.integers(0, 7), stride=st.sampled_from([1, 2, 4]))
    def check(unit, offset, stride):
        case, bench = bench_of(on, 8, stride)
        keys = -torch.ones_like(case.tokens(1))
        keys[8 * unit + offset] = 60
        bench.prefill(1, keys)
        q = torch.ones(1, 1, 4, 64)
        for lane in bench.retrieve(q, [1])[0].tolist():
            assert unit in lane

    check()


@pytest.mark.parametrize("stride", [3, 0, 16, "4", True])
def test_strides_that_do_not_divide_a_unit_are_refused(on, stride):
    with pytest.raises(
        ConfigError, match=r"stride (must be a number of tokens|of infllm_v2 must)"
    ):
        bench_of(on, 8, stride)
