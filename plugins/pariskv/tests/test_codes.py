"""Rotation, codes and estimates against float64, and the kernels' codes bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from topkv_authoring.outliers import expand
from topkv_pariskv import reference
from topkv_testing.algorithm.bench import AlgorithmBench
from topkv_testing.algorithm.case import Case
from topkv_testing.differences import require_same
from topkv_testing.kit import subject_of
from topkv_testing.strategies import Geometry
from topkv_testing.tiers import tier


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dim", [12, 16, 64, 96])
def test_rotation_keeps_products(dim):
    """A Hadamard matrix, of 1 and -1 with orthogonal rows, rotates behind signs of channels."""
    signs = reference.flips(dim)
    wide = len(signs)
    assert wide == max(16, 2 ** math.ceil(math.log2(dim)))
    assert torch.equal(signs, reference.flips(dim)), "signs differ from one call to the next"
    assert 0 < (signs < 0).sum() < wide
    matrix = reference.rotate(torch.eye(wide), signs).T
    assert torch.equal(matrix.abs(), torch.ones(wide, wide))
    assert torch.equal(matrix @ matrix.T, wide * torch.eye(wide))
    x, y = drawn(1, 5, dim).double(), drawn(2, 5, dim).double()
    products = (reference.rotate(x, signs) * reference.rotate(y, signs)).sum(-1) / wide
    torch.testing.assert_close(products.double(), (x * y).sum(-1), rtol=1e-5, atol=1e-5)


def estimates(q, k, outliers=4):
    """Estimates ``[n, m]`` of products of queries ``[n, D]`` and keys ``[m, D]``."""
    signs = reference.flips(k.shape[-1])
    kept = [rows[None] for rows in reference.encode(k[:, None], signs, outliers)]
    return reference.head_scores(q[:, None], *kept, signs)[:, 0]


def codes_alone(q, k):
    """Estimates by codes of whole keys, without outliers."""
    signs = reference.flips(k.shape[-1])
    z = reference.rotate(k, signs)
    factor = k.float().square().sum(-1) / z.abs().sum(-1)
    return reference.rotate(q, signs) @ (torch.where(z < 0, -1.0, 1.0) * factor[:, None]).T


def test_a_query_along_the_key_is_estimated_exactly():
    """Exact is up to the rounding of the factor to bfloat16. Keys are of one size, and nothing
    leaves."""

    @given(seed=st.integers(0, 99), dim=st.sampled_from([16, 64, 96]))
    @settings(deadline=None, max_examples=10)
    def check(seed, dim):
        k = drawn(seed, 4, dim).sign() + drawn(seed + 1, 4, dim) / 8
        got = estimates(-2.5 * k, k).diagonal()
        torch.testing.assert_close(got, -2.5 * k.square().sum(-1), rtol=2**-8, atol=0)

    check()


def test_estimates_err_as_randomly_rotated_signs_do():
    """Nothing is lost of the part of q along k. The rest of q leaves an error of about
    ``sqrt((pi / 2 - 1) / P)`` of the lengths, whose mean over keys is small.
    """
    q, k = drawn(3, 64, 64), drawn(4, 64, 64)
    k[:, 7] *= 4
    lengths = q.norm(dim=-1)[:, None] * k.norm(dim=-1)
    errors = (estimates(q, k) - q @ k.T) / lengths
    expected = math.sqrt((math.pi / 2 - 1) / 64)
    assert 0.7 * expected < errors.square().mean().sqrt() < 1.3 * expected
    assert errors.mean().abs() < 0.2 * expected


def rotary(x, positions, theta=5e5):
    """Rows ``[n, D]`` at their positions, float64."""
    half = x.shape[-1] // 2
    turns = positions[:, None] * theta ** (-torch.arange(half).double() / half)
    low, high = x.double().unflatten(-1, (2, half)).unbind(1)
    cos, sin = turns.cos(), turns.sin()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


@pytest.mark.parametrize("size", [30, 300])
@pytest.mark.parametrize("channels", [(31, 63), (3, 17), (5, 20, 61, 30)])
def test_a_bias_in_few_channels_changes_no_ranking(channels, size):
    """A bias of keys as Qwen2 has, of slow pairs and of fast ones, behind RoPE: logits err as
    they do without it, to queries that look there and to such that do not, and as many of the
    best keys are found. Codes of whole keys find less than half of those.
    """
    tokens, best = torch.arange(1024), 51

    def measured(bias, looks, estimates=estimates):
        k = drawn(5, 1024, 64)
        k[:, list(channels)] += bias * torch.tensor([1.0, -0.7, 0.5, 0.8])[: len(channels)]
        q = 2 * drawn(6, 16, 64)
        pairs = [c % 32 for c in channels]
        q[:, pairs + [p + 32 for p in pairs]] *= looks
        q, k = rotary(q, tokens[-16:]), rotary(k, tokens).bfloat16()
        got = estimates(q.float(), k)
        exact = q @ k.double().T
        errors = got.double() - exact
        errors = errors - errors.mean(-1, keepdim=True)  # softmax does not see it
        chosen = [x.topk(best).indices.tolist() for x in (*got, *exact)]
        found = sum(len({*a} & {*b}) for a, b in zip(chosen[:16], chosen[16:], strict=True))
        return errors.square().mean().sqrt(), found / 16 / best

    for looks in (0, 1):
        without, found = measured(0, looks)
        error, still = measured(size, looks)
        assert error < 1.15 * without
        assert still > found - 0.05
    assert measured(size, 0, codes_alone)[1] < 0.5 * measured(0, 0)[1]


def test_a_code_says_the_direction_and_the_factor_the_length():
    @given(seed=st.integers(0, 99), exponent=st.integers(-9, 9))
    @settings(deadline=None, max_examples=10)
    def check(seed, exponent):
        k, signs = drawn(seed, 3, 2, 48).bfloat16(), reference.flips(48)
        k[0, 0, 7] = 50  # leaves
        codes, factor, words = reference.encode(k, signs, 2)
        longer, twice, raised = reference.encode(k * 2.0**exponent, signs, 2)
        assert torch.equal(longer, codes)
        assert torch.equal(twice.float(), factor.float() * 2.0**exponent)
        gone = expand(words, 48)
        assert torch.equal(expand(raised, 48), gone * 2.0**exponent)
        assert torch.equal(factor.signbit(), (gone != 0).any(-1))
        assert factor[0, 0] < 0
        z = reference.rotate(k - gone, signs)
        assert torch.equal(reference.decode(codes), torch.where(z < 0, -1.0, 1.0))

    check()


@pytest.mark.parametrize("name", ["interpret", "gpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_write_what_the_reference_writes(name, dtype):
    """Bits are those of the reference, for a prompt and a step, though they are signs of rounded
    sums."""
    on = tier(name)
    if on.missing:
        pytest.skip(on.missing)
    for dim in (12, 64):
        case = Case(
            geometry=Geometry(3, 2, dim, 1, 16, "kv_head", dtype),
            params={},
            select=2,
            ring=2,
            keys="normal",
            seed=dim,
            least_units=24,
            stale=math.nan,
            exact=False,
        )
        subject = subject_of("pariskv", "algorithm", on)
        stored = []
        for impl in ("reference", "triton"):
            bench = AlgorithmBench(subject, case, impl=impl)
            keys = case.tokens(1)[:21]
            keys[7:, :, 1] += 300  # of a prompt and of a step
            keys[3] = 0
            bench.prefill(1, keys[:20])
            bench.append([1], keys[20:])
            stored.append(bench.stored(1))
        require_same(stored[1], stored[0], f"codes of {dim} channels")
        assert (stored[0]["factor"][3] == 0).all(), "a key of zeros has another factor than 0"
        assert (stored[0]["outliers"][7:, :, 0] & 511 == 1).all(), "a large bias has not left"
