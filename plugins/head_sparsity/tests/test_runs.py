"""Means of runs in 4 bits: how far they are off, and the kernels' bits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.head_sparsity.tests.test_conformance import ENTRY
from topkv_head_sparsity import reference
from topkv_testing.algorithm.bench import AlgorithmBench
from topkv_testing.algorithm.case import Case
from topkv_testing.differences import require_same
from topkv_testing.kit import subject_of
from topkv_testing.strategies import KEYS, Geometry, key_kinds
from topkv_testing.tiers import tier


def unpacked(codes, scale, dim):
    """float64 ``[..., dim]``, as the README says that a mean is read."""
    half = codes.shape[-1]
    number = [(codes[..., c % half].double() // (16 if c >= half else 1)) % 16 for c in range(dim)]
    return (torch.stack(number, -1) - 8) * scale.double()[..., None]


def test_no_channel_is_off_by_more_than_half_a_scale():
    """Channels are compared with the mean of the tokens that are there, and of those alone."""

    @given(
        seed=st.integers(0, 99),
        dim=st.sampled_from([1, 5, 16, 33]),
        unit=st.sampled_from([1, 3, 4, 10]),
        kind=key_kinds(),
        dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
        data=st.data(),
    )
    @settings(deadline=None, max_examples=40)
    def check(seed, dim, unit, kind, dtype, data):
        keys = KEYS[kind]((3 * unit, 2, dim), torch.Generator().manual_seed(seed)).to(dtype)
        keys = keys.unflatten(0, (3, unit))
        held = [data.draw(st.integers(1, unit)) for _ in range(3)]
        valid = torch.arange(unit) < torch.tensor(held)[:, None]
        codes, scale = reference.encode(
            reference.means(keys.masked_fill(~valid[..., None, None], math.nan), valid)
        )
        assert codes.shape == (3, 2, -(-unit // 4), (dim + 1) // 2)
        got = unpacked(codes, scale, dim)
        assert torch.equal(reference.decode(codes, scale, dim).double(), got.float().double())
        for each, count in enumerate(held):
            for run in range(-(-unit // 4)):
                mean, least = torch.zeros(2, dim).double(), torch.zeros(2).double()
                if run * 4 < count:
                    tokens = keys[each, run * 4 : min(run * 4 + 4, count)].double()
                    mean, least = tokens.mean(0), tokens.abs().amax((0, 2))
                slack = 1e-6 * least
                error = (got[each, :, run] - mean).abs().amax(-1)
                assert (error <= scale[each, :, run] / 2 + slack).all()
                seventh = mean.abs().amax(-1) / 7
                assert ((scale[each, :, run] - seventh).abs() <= slack).all()

    check()


@pytest.mark.parametrize("name", ["interpret", "gpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_write_what_the_reference_writes(name, dtype):
    """Bits are those of the reference, for a prompt and for a step."""
    on = tier(name)
    if on.missing:
        pytest.skip(on.missing)
    for dim, unit, keys in ((5, 1, "heavy"), (12, 6, "normal"), (64, 8, "normal")):
        case = Case(
            geometry=Geometry(3, 2, dim, unit, 2 * unit, "kv_head", dtype),
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
            made = case.tokens(1)[: 3 * unit + 2]
            made[3] = 0
            bench.prefill(1, made[: 2 * unit + 1])
            for key in made[2 * unit + 1 :]:
                bench.append([1], key[None])
            stored.append(bench.stored(1))
        require_same(stored[1], stored[0], f"means of {dim} channels in units of {unit}")
