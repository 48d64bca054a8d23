"""Coded rows: what their bytes say, their error, and the kernel that rounds."""

from __future__ import annotations

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from topkv.kv.host_pool import POISON  # noqa: E402
from topkv_fp8_host_format import row_kernels  # noqa: E402
from topkv_fp8_host_format.rows import (  # noqa: E402
    EXPONENTS,
    decode_rows,
    encode_rows,
    rounded,
)
from topkv_testing.models.host_formats import coding  # noqa: E402
from topkv_testing.transfer.bench import group_shape, random_tokens, raw  # noqa: E402

NEEDS_GPU = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
DEVICES = [
    pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])
    if CUDA
    else pytest.param("cpu", id="interpret")
]
dtypes = st.sampled_from(list(EXPONENTS))
seeds = st.integers(0, 999)


def e4m3(code):
    """The value of an e4m3fn code, from its definition."""
    sign, exponent, fraction = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if code & 127 == 127:
        return math.nan
    if exponent == 0:
        return sign * fraction * 2.0**-9
    return sign * (8 + fraction) * 2.0 ** (exponent - 10)


VALUES = torch.tensor([e4m3(code) for code in range(256)], dtype=torch.float64)


def some_rows(seed, dtype, dim=12):
    """Rows of all sizes and of any bits, of zeros, and at both ends of the dtype."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.randint(-30, 30, (20, 2, 1), generator=generator)
    sized = torch.randn(20, 2, dim, generator=generator) * 2.0**size
    wild = random_tokens((20, 2, dim), dtype, generator)
    info = torch.finfo(dtype)
    ends = torch.tensor([info.max, info.smallest_normal, info.smallest_normal / 4, 0.0, -0.0])
    ends = ends.to(dtype)[:, None, None].expand(5, 2, dim)
    return torch.cat([sized.clamp(info.min, info.max).to(dtype), wild, ends])


def steps_by_hand(codes, words):
    """Steps of every element by its words, as the page describes them; and a mask of the elements
    of the four pairs of the largest codes."""
    steps, largest = torch.zeros(codes.shape), torch.zeros(codes.shape, dtype=torch.bool)
    dim = codes.shape[-1]
    half = (dim + 1) // 2
    for place in torch.cartesian_prod(*(torch.arange(size) for size in codes.shape[:-1])).tolist():
        row = [code & 127 for code in codes[*place].tolist()] + [0] * (2 * half - dim)
        order = sorted(range(half), key=lambda p: (-max(row[p], row[half + p]), p))[:4]
        said = words[*place].tolist()
        said = [said[2 * n] + 256 * said[2 * n + 1] for n in range(4)]
        assert [word & 255 for word in said[: len(order)]] == order
        for word, pair in zip(said, order, strict=False):
            for element, bits in ((pair, word >> 8 & 15), (half + pair, word >> 12)):
                if element < dim:
                    steps[*place, element] = bits - 16 * (bits > 7)
                    largest[*place, element] = True
    return steps, largest


@given(seeds, dtypes, st.sampled_from([1, 5, 12]))
@settings(deadline=None, max_examples=30)
def test_an_element_is_its_code_and_its_steps_times_its_power_and_near(seed, dtype, dim):
    rows = some_rows(seed, dtype, dim)
    codes, words, exponents = encode_rows(rows)
    assert (codes.shape, exponents.shape) == (rows.shape, (*rows.shape[:-1], 1))
    power = exponents.double() - 127
    least, most = EXPONENTS[dtype]
    assert ((power >= least) & (power <= most)).all()
    steps, largest = steps_by_hand(codes, words)
    nearest = VALUES[codes.long()]
    # A step is the eighth significant bit; of the binade below, where it leads there.
    exponent = nearest.abs().frexp().exponent
    below = (nearest.abs().frexp().mantissa == 0.5) & (steps < 0)
    step = torch.ldexp(torch.ones_like(nearest), exponent - 8 - below.int())
    expected = (nearest + nearest.sign() * torch.where(steps == 0, 0, steps * step)) * 2.0**power
    got = decode_rows(codes, words, exponents, dtype)
    finite = rows.isfinite()
    assert torch.equal(got.isfinite(), finite), "NaN and infinity alone become NaN"
    # Exact: no rounding on the way from float64 to the dtype, and none overflows.
    assert torch.equal(got.double()[finite], expected[finite])
    error = (got.double() - rows.double()).abs()
    # Half a unit in the last place: 2 ** -4 of a normal code, 2 ** -10 of the scale below.
    bound = torch.maximum(rows.double().abs() / 16, 2.0 ** (power - 10))
    assert (error <= bound)[finite].all()
    # Below code 8 a step is a sixteenth of what is between two codes.
    normal = largest & (codes & 127 > 8) & (codes & 127 != 127)
    normal &= (expected.abs() >= 2.0 ** (least + 2)) & (power < most)
    # Codes of the largest pairs err by a step less at a tie, and by half a step else.
    assert (error <= expected.abs() / 128)[normal].all()
    if dtype is torch.bfloat16:
        untied = normal & (steps.abs() < 7)
        assert (error == 0)[untied].all()


@pytest.mark.parametrize("where", [(31, 63), (3, 17, 40, 25)])
def test_a_bias_in_few_channels_makes_no_logit_worse(where):
    """With a bias in keys, as Qwen2 has, logits err hardly more than by codes alone without the
    bias; by codes alone with the bias they err eight times as much."""
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(2000, 64, generator=generator)
    q = torch.randn(64, 16, generator=generator, dtype=torch.float64)

    def error(bias, alone=False):
        biased = keys.clone()
        biased[:, where] += bias
        biased = biased.bfloat16()
        codes, words, exponents = encode_rows(biased)
        made = decode_rows(codes, words * (not alone), exponents, torch.bfloat16)
        return ((made.double() - biased.double()) @ q).std()

    assert error(300) < 1.2 * error(0, alone=True)
    assert error(300, alone=True) > 8 * error(0, alone=True)


@given(seeds, dtypes)
@settings(deadline=None, max_examples=30)
def test_no_tighter_power_would_do(seed, dtype):
    rows = some_rows(seed, dtype).double()
    amax = torch.where(rows.isfinite(), rows, 0).abs().amax(-1, keepdim=True)
    power = encode_rows(rows.to(dtype))[2].double() - 127
    least, _ = EXPONENTS[dtype]
    assert (amax <= 448 * 2.0**power).all()
    assert ((amax > 448 * 2.0 ** (power - 1)) | (power == least)).all()


@given(seeds, dtypes)
@settings(deadline=None, max_examples=30)
def test_what_was_rounded_stays(seed, dtype):
    once = rounded(some_rows(seed, dtype, dim=5 + seed % 28))
    assert torch.equal(raw(rounded(once)), raw(once))


@pytest.mark.parametrize("dtype", EXPONENTS, ids=str)
def test_every_code_comes_back_under_every_power(dtype):
    least, most = EXPONENTS[dtype]
    values = VALUES[~VALUES.isnan()].unique()
    for power in range(least, most + 1):
        fitting = values if power < most else values[values.abs() <= 240]
        row = (fitting * 2.0**power).to(dtype)
        assert torch.equal(row.double(), fitting * 2.0**power), f"2 ** {power} * code is exact"
        assert torch.equal(raw(rounded(row)), raw(row))


def test_zeros_nan_and_poison():
    for dtype, (least, _) in EXPONENTS.items():
        codes, words, exponents = encode_rows(torch.zeros(2, 4, dtype=dtype))
        assert not codes.any()
        assert not (words[:, 1::2]).any(), "an element that is 0 has steps"
        assert (exponents == least + 127).all()
        row = torch.tensor([1.0, math.nan, -math.inf, -448.0], dtype=dtype)
        assert rounded(row).isnan().tolist() == [False, True, True, False]
        assert rounded(row)[[0, 3]].tolist() == [1.0, -448.0]
        freed = torch.full((2, 13), POISON, dtype=torch.uint8)
        assert decode_rows(freed[:, :4], freed[:, 4:12], freed[:, 12:], dtype).isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_rounds_to_the_same_bits(device):
    @given(seeds, dtypes, st.sampled_from([1, 4, 12, 20, 128]), st.booleans())
    @settings(deadline=None, max_examples=12 if device == "cpu" else 60)
    def check(seed, dtype, dim, apart):
        rows = some_rows(seed, dtype, dim)
        k, v = rows.to(device), rows.flip(0, 1).to(device)
        if apart:  # rows and heads of a wider tensor
            k, v = torch.cat([k, v], -1).split(dim, -1)
        form = coding(group_shape(dim=dim, dtype=dtype), "triton")
        out = torch.full((2, len(rows) + 1, 2, dim), -77.0, dtype=dtype, device=device)
        got = form.round(k, v, out[:, :-1].unbind())
        for mine, theirs in zip(got, (rows, rows.flip(0, 1)), strict=True):
            assert torch.equal(raw(mine), raw(rounded(theirs)))
        assert (out[:, -1] == -77).all(), "wrote behind the rows"
        made = form.round(k, v)
        assert all(torch.equal(raw(a), raw(b)) for a, b in zip(made, got, strict=True))

    check()


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows_are_no_launch(device):
    none = torch.empty((0, 2, 4), device=device)
    row_kernels.round_rows(none, none, none, none)
