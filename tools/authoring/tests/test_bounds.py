"""Bounds of keys and numbers up to bfloat16: by the definition, and the kernels' bits."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from topkv_authoring import bounds
from topkv_testing.tiers import tier

EDGES = (0.0, -0.0, 1.0, 1.00390625, 1.0039063692092896, -1.0039063692092896, 1e-45, -1e-45, 3e38)
numbers = st.one_of(st.sampled_from(EDGES), st.floats(-(2.0**127), 2.0**127, width=32))


@given(st.lists(numbers, min_size=1, max_size=32))
def test_a_number_goes_up_to_the_next_bfloat16_and_no_further(values):
    x = torch.tensor(values)
    up = bounds.bf16_up(x)
    assert torch.equal(up, up.bfloat16().float()), "these are no bfloat16 numbers"
    assert (up >= x).all()
    below = torch.nextafter(up.bfloat16(), torch.tensor(-math.inf).bfloat16()).float()
    assert (below < x).all(), "a smaller bfloat16 number is not below either"


def test_bounds_are_those_of_valid_keys_and_have_no_negative_zero():
    keys = torch.tensor([[-0.0, 0.5], [-2.0, -0.0], [math.nan, 9.0]])[None, :, None]
    low, high = bounds.minmax(keys, torch.tensor([[True, True, False]]))
    assert low.tolist() == [[[-2.0, 0.0]]]
    assert high.tolist() == [[[0.0, 0.5]]]
    assert not torch.signbit(high).any()
    assert not torch.signbit(low[..., 1]).any()


@triton.jit
def both_kernel(p_keys, p_low, p_high, p_up, tokens, T: tl.constexpr, D: tl.constexpr):
    t, d = tl.arange(0, T)[:, None], tl.arange(0, D)[None, :]
    keys = tl.load(p_keys + t * D + d)
    low, high = bounds.key_bounds(keys, (t < tokens) & (d >= 0))
    tl.store(p_low + tl.arange(0, D), low)
    tl.store(p_high + tl.arange(0, D), high)
    tl.store(p_up + t * D + d, bounds.raised(keys))


@pytest.mark.parametrize("name", ["interpret", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_device_functions_give_the_bits_of_their_formulas(name):
    where = tier(name)
    if where.missing:
        pytest.skip(where.missing)
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(16, 32, generator=generator) * 10.0 ** torch.arange(-30, 34, 2)
    keys[3], keys[:, 5], keys[1, 7] = 0.0, -0.0, -1.5
    flat = keys.flatten()
    flat[: len(EDGES)] = torch.tensor(EDGES)
    keys = keys.to(where.device)
    low, high = torch.empty(2, 32, device=where.device)
    up = torch.empty_like(keys)
    both_kernel[(1,)](keys, low, high, up, 11, T=16, D=32)
    valid = torch.arange(16, device=where.device) < 11
    for got, expected in zip(
        (low, high, up),
        (*bounds.minmax(keys[None, :, None], valid[None]), bounds.bf16_up(keys)),
        strict=True,
    ):
        assert torch.equal(got.flatten().view(torch.int32), expected.flatten().view(torch.int32))
