"""4-bit copies of keys: how far they are off, and the kernels' bits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.top_p.tests.test_conformance import ENTRY
from topkv_authoring.outliers import expand
from topkv_testing.algorithm.bench import AlgorithmBench
from topkv_testing.algorithm.case import Case
from topkv_testing.differences import require_same
from topkv_testing.kit import subject_of
from topkv_testing.strategies import KEYS, Geometry, key_kinds
from topkv_testing.tiers import tier
from topkv_top_p import reference


def unpacked(codes, meta, words, dim):
    """float64 ``[..., dim]``, as the README says that a copy is read; and its scale."""
    number = [(codes[..., c // 2].double() // 16 ** (c % 2)) % 16 for c in range(dim)]
    scale, zero = meta.double().unbind(-1)
    rest = torch.stack(number, -1) * scale.abs()[..., None] + zero[..., None]
    return rest + expand(words, dim).double(), scale.abs()


def test_no_channel_is_off_by_more_than_half_a_scale():
    """The scale is a fifteenth of the range, but for the rounding of scale and zero."""

    @given(
        seed=st.integers(0, 99),
        dim=st.sampled_from([1, 5, 16, 33]),
        kind=key_kinds(),
        dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    )
    @settings(deadline=None, max_examples=40)
    def check(seed, dim, kind, dtype):
        generator = torch.Generator().manual_seed(seed)
        k = KEYS[kind]((7, 2, dim), generator).to(dtype)
        k[2:4, 1, -1] += 300
        k[3] = 0
        codes, meta, words = reference.encode(k, 3)
        assert codes.shape == (7, 2, (dim + 1) // 2)
        got, scale = unpacked(codes, meta, words, dim)
        gone = expand(words, dim).double()
        assert torch.equal(meta[..., 0].signbit(), words[..., 0] != 0)
        low, high = (k.double() - gone).aminmax(dim=-1)
        slack = 1e-6 * (low.abs() + high.abs() + gone.abs().amax(-1))
        assert ((got - k.double()).abs() <= (scale / 2 + slack)[..., None]).all()
        # bfloat16 rounds by less than 2**-7: zero down, the range from there up.
        widest = (high - low + 2**-7 * low.abs()) / 15 * (1 + 2**-7) + slack
        assert (scale <= widest).all()
        assert torch.equal(
            reference.decode(codes, meta, words, dim).double(), got.float().double()
        )
        assert (got[3] == 0).all()

    check()


@pytest.mark.parametrize("name", ["interpret", "gpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_write_what_the_reference_writes(name, dtype):
    """Bits are those of the reference, for a prompt and for a step."""
    on = tier(name)
    if on.missing:
        pytest.skip(on.missing)
    for dim, keys in ((5, "heavy"), (12, "normal"), (64, "normal")):
        case = Case(
            geometry=Geometry(3, 2, dim, 4, 4, "kv_head", dtype),
            params={},
            select=2,
            ring=2,
            keys=keys,
            seed=dim,
            least_units=8,
            stale=math.nan,
            exact=False,
        )
        subject, stored = subject_of(ENTRY, "stage", on), []
        for impl in ("reference", "triton"):
            bench = AlgorithmBench(subject, case, impl=impl)
            made = case.tokens(1)[:21]
            made[7:, :, 1] += 300  # of a prompt and of steps
            made[3] = 0
            bench.prefill(1, made[:18])
            for key in made[18:]:
                bench.append([1], key[None])
            stored.append(bench.stored(1))
        require_same(stored[1], stored[0], f"copies of {dim} channels")


@pytest.mark.parametrize("size", [30, 300])
@pytest.mark.parametrize("channels", [(31, 63), (3, 17), (5, 20, 61, 30)])
def test_a_bias_in_few_channels_makes_no_copy_worse(channels, size):
    """Keys have a bias as Qwen2's do, which RoPE turns: logits err as they do without it, and
    would err by more than five times as much if the whole key were copied."""
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randn(1024, 64, generator=generator, dtype=torch.float64)
    q = torch.randn(16, 64, generator=generator, dtype=torch.float64)
    half = torch.arange(32)
    turns = torch.arange(1024)[:, None] * 5e5 ** (-half.double() / 32)

    def error(bias, whole=False):
        k = drawn.clone()
        k[:, channels] += bias * torch.tensor([1.0, -0.7, 0.5, 0.8])[: len(channels)].double()
        low, high = k[:, :32], k[:, 32:]
        cos, sin = turns.cos(), turns.sin()
        k = torch.cat([low * cos - high * sin, high * cos + low * sin], -1).bfloat16()
        codes, meta, words = reference.encode(k, 4)
        off = reference.decode(codes, meta, words, 64).double() - k.double()
        if whole:
            least, most = k.double().aminmax(dim=-1, keepdim=True)
            step = (most - least) / 15
            off = ((k.double() - least) / step).round() * step + least - k.double()
        return (q @ off.T).std()

    assert error(size) < 1.2 * error(0)
    assert error(size, whole=True) > 5 * error(0)
