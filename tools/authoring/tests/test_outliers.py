"""Channels that outweigh the others of a key: by hand in float64, and the kernels' bits."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import assume, given
from hypothesis import strategies as st

from topkv_authoring import outliers, outliers_kernels
from topkv_testing.strategies import KEYS, key_kinds
from topkv_testing.tiers import tier


@st.composite
def keys(draw):
    """Rows ``[9, D]`` of which some channels may be large, and N."""
    dim = draw(st.sampled_from([1, 5, 12, 16, 33, 64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows = KEYS[draw(key_kinds())]((9, 1, dim), generator)[:, 0]
    large = draw(st.lists(st.integers(0, dim - 1), max_size=6))
    size = draw(st.sampled_from([3.0, 8.0, 30.0, 300.0, 2.0**50, 2.0**-50]))
    rows[:, large] += size * torch.randn(9, len(large), generator=generator)
    rows[3] = 0
    return rows.to(draw(st.sampled_from([torch.bfloat16, torch.float32]))), draw(st.integers(1, 8))


def by_hand(row, count):
    """Outliers that leave a row, in float64; and True if no pair is at the edge of leaving."""
    dim = len(row)
    half = (dim + 1) // 2
    sizes = {p: max(abs(row[c]) for c in (p, half + p) if c < dim) for p in range(half)}
    first = sorted(sizes, key=lambda p: (-sizes[p], p))[:count]
    others = sum(abs(x) for c, x in enumerate(row) if c % half not in first)
    gone, sure = [0.0] * dim, True
    for p in first:
        bound = 8 * others / dim
        sure &= math.isclose(sizes[p], 0) or not math.isclose(sizes[p], bound, rel_tol=1e-5)
        if sizes[p] <= bound:
            continue
        step = 2.0 ** min(63, max(-64, math.floor(math.log2(sizes[p])) - 6))
        for c in (p, half + p):
            if c < dim:
                gone[c] = step * min(127, max(-127, math.floor(row[c] / step + 0.5)))
    return gone, sure


@given(keys())
def test_what_leaves_is_what_leaves_by_hand(case):
    rows, count = case
    words, rest = outliers.split(rows, count)
    gone = outliers.expand(words, rows.shape[1])
    assert words.shape == (9, count)
    assert torch.equal(gone.double() + rest.double(), rows.double()), "something is lost"
    for row, got in zip(rows.double().tolist(), gone.double().tolist(), strict=True):
        expected, sure = by_hand(row, count)
        assume(sure)
        assert got == expected
    leaves = (gone != 0).any(-1)
    assert torch.equal(leaves, words[:, 0] != 0), "the first word says whether anything leaves"


def test_a_bias_leaves_and_other_channels_stay():
    """Three of 32 pairs with a bias leave keys of one size, and what stays of these pairs is no
    larger than the others."""
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(500, 64, generator=generator)
    biased = plain.clone()
    for channel, bias in ((2, 300.0), (40, -70.0), (31, 921.0)):
        biased[:, channel] += bias
    assert (outliers.split(plain, 4)[0] != 0).float().mean() < 0.01
    words, rest = outliers.split(biased, 4)
    assert {*(words[:, :3] & 511).flatten().tolist()} == {2, 8, 31}
    stay = [c for c in range(64) if c % 32 not in (2, 8, 31)]
    assert torch.equal(rest[words[:, 3] == 0][:, stay], plain[words[:, 3] == 0][:, stay])
    assert rest.abs().amax() <= max(plain.abs().amax(), 2.0**9 / 64)


def test_keys_have_no_more_channels_than_a_word_counts():
    assert not outliers.refusals(1024)
    assert outliers.refusals(1025) == ["keys may have at most 1024 channels, got 1025"]


@triton.jit
def _split_kernel(
    p_x, p_words, p_rest, p_left, ROWS: tl.constexpr, WIDE: tl.constexpr, LOG_WIDE: tl.constexpr,
    D: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    row, d = tl.arange(0, ROWS), tl.arange(0, WIDE)
    live = (row < 9)[:, None] & (d < D)[None, :]
    at = row[:, None] * D + d[None, :]
    x = tl.load(p_x + at, live, other=0.0).to(tl.float32)
    p_own = p_words + row * PAIRS
    rest, left = outliers_kernels.split(x, p_own, row < 9, ROWS, WIDE, LOG_WIDE, D, PAIRS)
    tl.store(p_rest + at, rest, live)
    tl.store(p_left + row, left.to(tl.int32), row < 9)


@triton.jit
def _products_kernel(p_words, p_q, p_out, D: tl.constexpr, PAIRS: tl.constexpr):
    t, g = tl.arange(0, 16), tl.arange(0, 4)
    live, in_g = t < 9, g < 3
    found = outliers_kernels.products(p_words + t * PAIRS, live, p_q + g * D, in_g, D, PAIRS)
    tl.store(p_out + g[:, None] * 9 + t[None, :], found, in_g[:, None] & live[None, :])


@pytest.mark.parametrize("name", ["interpret", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_kernels_do_what_the_reference_does(name):
    """Words and rests are equal bits; products are those of the outliers in float64."""
    on = tier(name)
    if on.missing:
        pytest.skip(on.missing)

    @given(keys())
    def check(case):
        rows, count = case
        dim, wide = rows.shape[1], max(16, triton.next_power_of_2(rows.shape[1]))
        x = rows.to(on.device)
        made = {"device": on.device, "dtype": torch.int32}
        words, left = torch.full((9, count), -1, **made), torch.full((9,), -1, **made)
        rest = torch.full((9, dim), math.nan, device=on.device)
        sizes = {"ROWS": 16, "WIDE": wide, "LOG_WIDE": wide.bit_length() - 1}
        args = {"D": dim, "PAIRS": count}
        _split_kernel[(1,)](x, words, rest, left, **sizes, **args, enable_fp_fusion=False)
        expected = outliers.split(rows, count)
        assert torch.equal(words.cpu(), expected[0])
        assert torch.equal(rest.cpu(), expected[1])
        assert torch.equal(left.cpu() != 0, expected[0][:, 0] != 0)
        q = torch.randn(3, dim, generator=torch.Generator().manual_seed(dim)).to(on.device)
        found = torch.full((3, 9), math.nan, device=on.device)
        _products_kernel[(1,)](words, q, found, **args)
        gone = outliers.expand(expected[0], dim).double()
        exact, length = q.cpu().double() @ gone.T, q.cpu().double().abs() @ gone.abs().T
        assert ((found.cpu().double() - exact).abs() <= 1e-6 * length).all()

    check()
