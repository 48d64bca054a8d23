"""4-bit copies of keys: how far they are off, and the kernels' bits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.top_p.tests.test_conformance import ENTRY
from topkv.testing.algorithm.bench import AlgorithmBench
from topkv.testing.algorithm.case import Case
from topkv.testing.differences import require_same
from topkv.testing.kit import subject_of
from topkv.testing.strategies import KEYS, Geometry, key_kinds
from topkv.testing.tiers import tier
from topkv_top_p import reference


def unpacked(codes, meta, dim):
    """float64 ``[..., dim]``, as the README says that a copy is read; and its scale."""
    half = codes.shape[-1]
    number = [(codes[..., c % half].double() // (16 if c >= half else 1)) % 16 for c in range(dim)]
    scale, zero = meta.double().unbind(-1)
    return torch.stack(number, -1) * scale[..., None] + zero[..., None], scale


def test_no_channel_is_off_by_more_than_half_a_scale():
    """And the scale is a fifteenth of the range, but for the rounding of scale and zero."""

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
        k[3] = 0
        codes, meta = reference.encode(k)
        assert codes.shape == (7, 2, (dim + 1) // 2)
        got, scale = unpacked(codes, meta, dim)
        low, high = k.double().aminmax(dim=-1)
        slack = 1e-6 * (low.abs() + high.abs())
        assert ((got - k.double()).abs() <= (scale / 2 + slack)[..., None]).all()
        # bfloat16 rounds by less than 2**-7: zero down, the range from there up.
        widest = (high - low + 2**-7 * low.abs()) / 15 * (1 + 2**-7) + slack
        assert (scale <= widest).all()
        assert torch.equal(reference.decode(codes, meta, dim).double(), got.float().double())
        assert (got[3] == 0).all()

    check()


@pytest.mark.parametrize("name", ["interpret", "gpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_write_what_the_reference_writes(name, dtype):
    """Of a prompt and of a step, the same bits."""
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
            made[3] = 0
            bench.prefill(1, made[:18])
            for key in made[18:]:
                bench.append([1], key[None])
            stored.append(bench.stored(1))
        require_same(stored[1], stored[0], f"copies of {dim} channels")
