"""Packed latent rows: the format byte by byte, its error, and the kernel that writes it."""

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

from topkv_authoring import latent_fp8, latent_fp8_kernels  # noqa: E402

NEEDS_GPU = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
DEVICES = [
    pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])
    if CUDA
    else pytest.param("cpu", id="interpret")
]
SIZES = [0.0, 1e-30, 1e-8, 1e-4, 0.3, 1.0, 448.0, 449.0, 3e4]


def e4m3(code):
    """The value of an e4m3fn code, from its definition."""
    sign, exponent, fraction = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if exponent == 0:
        return sign * fraction * 2.0**-9
    return sign * (8 + fraction) * 2.0 ** (exponent - 10)


def latents(seed, sizes, dtype):
    """Rows ``[n, 1, 576]``; each tile of 128 latents has a size of its own."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(sizes), 1, 576, generator=generator)
    scale = torch.tensor(sizes, dtype=torch.float32).repeat_interleave(128, 1)
    x[:, 0, :512] *= scale
    return x.clamp(-6e4, 6e4).to(dtype)


tiles = st.lists(st.sampled_from(SIZES), min_size=4, max_size=4)
many = st.lists(tiles, min_size=1, max_size=7)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@given(seed=st.integers(0, 999), sizes=many, dtype=dtypes)
@settings(deadline=None, max_examples=30)
def test_a_row_is_what_its_bytes_say(seed, sizes, dtype):
    x = latents(seed, sizes, dtype)
    packed = latent_fp8.encode_fp8(x)
    assert packed.shape == (len(sizes), 1, 656)
    decoded = latent_fp8.decode_fp8(packed, torch.float64)
    for row, bytes_, got in zip(x[:, 0].double(), packed[:, 0], decoded[:, 0], strict=True):
        codes = bytes_[:512].tolist()
        scales = bytes_[512:528].clone().view(torch.float32).tolist()
        value = torch.tensor([e4m3(c) * scales[i // 128] for i, c in enumerate(codes)])
        assert torch.equal(got[:512], value.double())
        for tile, scale in enumerate(scales):
            part = row[128 * tile : 128 * (tile + 1)]
            least = max(float(part.abs().max()) / 448, 1e-4)
            assert scale == 2.0 ** math.ceil(math.log2(torch.tensor(least).float().item()))
            # Half a unit in the last place: 2 ** -4 of a normal number, 2 ** -10 of a scale.
            error = (got[128 * tile : 128 * (tile + 1)] - part).abs()
            assert (error <= torch.maximum(part.abs() / 16, torch.tensor(scale / 1024))).all()
        rope = bytes_[528:].clone().view(torch.bfloat16)
        assert torch.equal(rope, row[512:].to(torch.bfloat16))


@given(seed=st.integers(0, 999), shift=st.integers(-8, 8))
@settings(deadline=None, max_examples=20)
def test_what_the_format_holds_comes_back(seed, shift):
    once = latent_fp8.decode_fp8(latent_fp8.encode_fp8(latents(seed, [[1.0] * 4], torch.float32)))
    again = latent_fp8.decode_fp8(latent_fp8.encode_fp8(once))
    assert torch.equal(once, again)
    moved = once.clone()
    moved[..., :512] *= 2.0**shift
    back = latent_fp8.decode_fp8(latent_fp8.encode_fp8(moved))
    assert torch.equal(back[..., :512], once[..., :512] * 2.0**shift)


@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_writes_the_same_bytes(device):
    @given(seed=st.integers(0, 999), sizes=many, dtype=dtypes, apart=st.booleans())
    @settings(deadline=None, max_examples=12 if device == "cpu" else 40)
    def check(seed, sizes, dtype, apart):
        x = latents(seed, sizes, dtype)
        expected = latent_fp8.encode_fp8(x)
        if apart:  # rows of a wider tensor
            x = torch.cat([x, x], -1)[..., :576]
        out = torch.full((len(sizes), 1, 704), 0x77, dtype=torch.uint8, device=device)
        latent_fp8_kernels.encode_fp8(x.to(device), out[..., :656], 512, 128, 64)
        assert torch.equal(out[..., :656].cpu(), expected)
        assert (out[..., 656:] == 0x77).all(), "wrote behind a row"

    check()


@pytest.mark.parametrize("device", DEVICES)
def test_every_code_rounds_to_itself_and_ties_to_even(device):
    values = torch.tensor([e4m3(code) for code in range(256) if code & 127 != 127])
    values = values.unique()
    between = (values[1:].double() + values[:-1].double()).div(2).float()
    line = torch.cat([values, between])
    line = torch.nn.functional.pad(line, (0, 512 - len(line)))
    x = torch.zeros(4, 1, 576)
    x[:, 0, :512] = line.view(4, 128).repeat(1, 4)
    x[:, 0, 0:512:128] = 448.0  # scale 1
    expected = x[:, 0, :512].to(torch.float8_e4m3fn).view(torch.uint8)
    out = torch.empty((4, 1, 656), dtype=torch.uint8, device=device)
    latent_fp8_kernels.encode_fp8(x.to(device), out, 512, 128, 64)
    assert torch.equal(out[:, 0, :512].cpu(), expected)
    assert torch.equal(latent_fp8.encode_fp8(x), out.cpu())
