"""e4m3 codes, scales and the Hadamard transform, against their definitions."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from topkv_deepseek_dsa import formats, reference


@triton.jit
def decode_kernel(p_codes, p_out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(p_out + at, formats.decode_e4m3(tl.load(p_codes + at)))


@triton.jit
def encode_kernel(p_x, p_out, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(p_out + at, formats.encode_e4m3(tl.load(p_x + at)))


@triton.jit
def hadamard_kernel(p_x, p_out, LEVELS: tl.constexpr, FACTOR: tl.constexpr, DIM: tl.constexpr):
    at = tl.arange(0, 4)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(p_out + at, formats.hadamard(tl.load(p_x + at), LEVELS, FACTOR))


def encoded(x, device):
    """The kernel's codes of fp32 ``x``, int64."""
    padded = torch.zeros(-(-x.numel() // 128) * 128)
    padded[: x.numel()] = x
    out = torch.full(padded.shape, 93, dtype=torch.uint8, device=device)
    encode_kernel[(len(padded) // 128,)](padded.to(device), out, SIZE=128)
    return out[: x.numel()].cpu().long()


def sylvester(dim):
    """The Hadamard matrix of Sylvester's doubling, float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def test_the_kernel_decodes_every_code(values, device):
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    out = torch.full((256,), -7.0, device=device)
    decode_kernel[(1,)](codes, out, SIZE=256)
    finite = ~values.isnan()
    assert finite.sum() == 254
    assert torch.equal(out.cpu().double()[finite], values[finite])


def test_the_reference_decodes_every_code(values):
    found = reference.decode(torch.arange(256, dtype=torch.uint8)).double()
    assert torch.equal(found.nan_to_num(), values.nan_to_num())
    assert torch.equal(found.isnan(), values.isnan())


def near_ties(values):
    """Every code, every middle of two codes, and their neighbours in fp32, of both signs."""
    table = values[:127]
    points = torch.cat([table, (table[1:] + table[:-1]) / 2]).float()
    up = torch.nextafter(points, torch.tensor(1000.0))
    down = torch.nextafter(points, torch.tensor(-1000.0))
    every = torch.cat([points, up.clamp(max=448), down[points > 0]])
    return torch.cat([every, -every])


def check_codes(codes, x, values):
    """Codes are the nearest, of two equally near ones the even."""
    error = (values[codes] - x.double()).abs()
    table = values[:127]
    best = (table - x.double().abs()[:, None]).abs()
    least = best.amin(1)
    assert torch.equal(error, least)
    tied = (best == least[:, None]).sum(1) == 2
    assert (codes[tied] % 2 == 0).all()
    assert torch.equal(codes >= 128, torch.signbit(x))
    return int(tied.sum())


def test_the_kernel_rounds_to_nearest_even(values, device):
    x = near_ties(values)
    assert check_codes(encoded(x, device), x, values) == 2 * 126


def test_the_reference_rounds_to_nearest_even(values):
    # With 448 in the row the scale is 1.
    x = torch.cat([near_ties(values), torch.tensor([448.0])])
    codes, scale = reference.quantize(x, False)
    assert scale == 1
    assert check_codes(codes.long(), x, values) == 2 * 126


def test_the_kernel_rounds_random_numbers(values, device):
    generator = torch.Generator().manual_seed(0)
    spread = 2.0 ** torch.randint(-14, 9, (4096,), generator=generator)
    x = (torch.randn(4096, generator=generator) * spread).clamp(-448, 448)
    check_codes(encoded(x, device), x, values)


@given(seed=st.integers(0, 999), exponent=st.integers(-30, 30), power_of_two=st.booleans())
@settings(deadline=None, max_examples=40)
def test_what_a_code_may_be_off(values, seed, exponent, power_of_two):
    """2 ** -4 of the number, or half a step of the smallest codes: 2 ** -10 of the scale."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 128, generator=generator) * 2.0**exponent
    codes, scale = reference.quantize(x, power_of_two)
    wide = scale.double()[:, None]
    error = (values[codes.long()] * wide - x.double()).abs()
    # The quotient is rounded to fp32 before it is to a code.
    assert (error <= (x.double().abs() * 2**-4).maximum(wide * 2**-10) * (1 + 2**-20)).all()
    most = x.abs().amax(1).clamp(min=1e-4).double()
    if power_of_two:
        mantissa, _ = torch.frexp(scale)
        assert (mantissa == 0.5).all()
        assert (most <= 448 * scale.double() * (1 + 2**-23)).all()
        assert (most > 224 * scale.double()).all()
    else:
        assert ((scale.double() * 448 / most - 1).abs() <= 2**-23).all()


@given(seed=st.integers(0, 999), exponent=st.integers(-10, 30))
@settings(deadline=None, max_examples=20)
def test_powers_of_two_only_move_the_scale(seed, exponent):
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(seed))
    for power_of_two in (False, True):
        codes, scale = reference.quantize(x, power_of_two)
        moved, further = reference.quantize(x * 2.0**exponent, power_of_two)
        assert torch.equal(codes, moved)
        assert torch.equal(scale * 2.0**exponent, further)


@given(seed=st.integers(0, 999), exponent=st.integers(-10, 30))
@settings(deadline=None, max_examples=20)
def test_codes_times_a_power_of_two_are_kept(values, seed, exponent):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 127, (4, 64), generator=generator)
    codes[:, 0] = 126
    x = (values[codes] * 2.0**exponent).float()
    found, scale = reference.quantize(x, True)
    assert torch.equal(found.long(), codes)
    assert (scale == 2.0**exponent).all()


def test_rows_of_zeros_have_the_least_scale():
    codes, scale = reference.quantize(torch.zeros(2, 16), False)
    assert not codes.any()
    assert torch.equal(scale, torch.full((2,), 1e-4) / torch.full((2,), 448.0))


@pytest.mark.parametrize("dim", [16, 32, 128, 256])
def test_the_hadamard_transform_is_sylvesters(dim):
    x = torch.randn(6, dim, generator=torch.Generator().manual_seed(0))
    expected = x.double() @ sylvester(dim) * dim**-0.5
    found = reference.hadamard(x)
    assert (found.double() - expected).abs().max() <= dim * 2**-24 * x.abs().max()
    back = reference.hadamard(found)
    assert (back - x).abs().max() <= 2 * dim * 2**-24 * x.abs().max()


@pytest.mark.parametrize("dim", [16, 128])
def test_the_kernel_transforms_bit_for_bit(dim, device):
    x = torch.randn(4, dim, generator=torch.Generator().manual_seed(1))
    out = torch.full((4, dim), -7.0, device=device)
    levels = dim.bit_length() - 1
    hadamard_kernel[(1,)](x.to(device), out, LEVELS=levels, FACTOR=dim**-0.5, DIM=dim)
    assert torch.equal(out.cpu(), reference.hadamard(x))
