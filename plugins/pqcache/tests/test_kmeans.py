"""k-means of sub-vectors: what is said of it, in float64 or exactly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topkv_pqcache.kmeans import assign, first_centroids, kmeans, means, race
from topkv_testing.strategies import KEYS, key_kinds, seeds

SETS, DIM = 3, 6
CPU = torch.device("cpu")


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def problems(draw):
    """Vectors ``[g, n, d]``, centroids and a seed."""
    kind, vectors = draw(key_kinds()), draw(st.integers(1, 50))
    generator = torch.Generator().manual_seed(draw(seeds()))
    x = KEYS[kind]((vectors, SETS, DIM), generator).bfloat16().float().transpose(0, 1)
    return x.contiguous(), draw(st.integers(1, 20)), draw(st.integers(0, 9))


def squares(x, centroids):
    """Squared distances in float64, ``[g, n, C]``."""
    return (x.double()[:, :, None] - centroids.double()[:, None]).square().sum(-1)


def distortion(x, centroids):
    return squares(x, centroids).amin(2).sum(1)


@given(problem=problems(), iterations=st.integers(0, 4))
def test_the_same_vectors_give_the_same_bits_and_sets_do_not_see_each_other(problem, iterations):
    x, count, seed = problem
    once = kmeans(x, count, iterations, seed)
    assert torch.equal(kmeans(x, count, iterations, seed), once)
    assert torch.equal(kmeans(x.flip(0), count, iterations, seed).flip(0), once)
    assert torch.isfinite(once).all()


@given(problem=problems())
def test_first_centroids_are_vectors_and_none_comes_twice_while_others_are_left(problem):
    x, count, seed = problem
    centroids = first_centroids(x, count, seed)
    for own, first in zip(x, centroids, strict=True):
        values, chosen = ({tuple(row) for row in rows.tolist()} for rows in (own, first))
        assert chosen <= values
        assert len(chosen) == min(count, len(values))


@given(problem=problems(), iterations=st.integers(1, 5))
def test_an_iteration_lowers_the_error(problem, iterations):
    """The error falls, up to the rounding of centroids: a mean is its members' best centre."""
    x, count, seed = problem
    before, after = (kmeans(x, count, i, seed) for i in (iterations - 1, iterations))
    slack = 1e-5 * x.double().square().sum((1, 2)) + 1e-30
    assert (distortion(x, after) <= distortion(x, before) + slack).all()


@given(problem=problems())
def test_at_a_fixed_point_centroids_are_the_means_of_what_is_nearest(problem):
    x, count, seed = problem
    centroids = kmeans(x, count, 60, seed)
    by = squares(x, centroids)
    labels = assign(x, centroids)
    own = by.gather(2, labels[..., None])[..., 0]
    slack = 1e-5 * (
        x.double().square().sum(2) + centroids.double().square().sum(2).amax(1)[:, None]
    )
    assert (own <= by.amin(2) + slack).all()
    for vectors, found, label in zip(x, centroids, labels, strict=True):
        size = vectors.double().abs().max()
        for c in label.unique().tolist():
            true = vectors[label == c].double().mean(0)
            assert (found[c].double() - true).abs().max() <= 1e-5 * size + 1e-30


@given(problem=problems(), iterations=st.integers(0, 4))
def test_few_different_vectors_are_centroids_themselves(problem, iterations):
    """Centroids are exact up to the rounding of a mean of equal numbers."""
    x, count, seed = problem
    x = x[:, torch.arange(x.shape[1]) % count]  # at most as many as there are centroids
    centroids = kmeans(x, count, iterations, seed)
    assert (squares(x, centroids).amin(2).sqrt() <= 1e-6 * x.double().norm(dim=2)).all()


def test_means_without_members_are_the_centroids_that_were():
    centroids = drawn(0, 1, 4, 2)
    got = means(torch.ones(1, 3, 2), torch.tensor([[0, 2, 2]]), centroids)
    assert torch.equal(got[0, [0, 2]], torch.ones(2, 2))
    assert torch.equal(got[0, [1, 3]], centroids[0, [1, 3]])


def test_a_race_draws_by_weights():
    """Two vectors with weights 1 and 3: a quarter of 4000 rows draws the first."""
    won = (race(4000, 2, 5, CPU) * torch.tensor([1.0, 3.0])).argmax(1)
    assert abs((won == 0).double().mean() - 0.25) < 0.03
    uniform = race(4000, 10, 0, CPU).argmax(1)
    assert (torch.bincount(uniform, minlength=10) - 400).abs().max() < 80


@pytest.mark.parametrize("vectors", [1, 7, 63, 64])
def test_a_race_goes_by_seed_row_and_place_alone(vectors):
    whole = race(9, 64, 3, CPU)
    assert torch.equal(race(9, vectors, 3, CPU), whole[:, :vectors])
    assert torch.equal(race(4, 64, 3, CPU), whole[:4])
    assert (race(9, 64, 4, CPU) != whole).any()
    assert torch.isfinite(whole).all()
    assert (whole > 0).all()


def test_another_seed_starts_elsewhere():
    x = drawn(1, 1, 200, DIM)
    starts = {tuple(first_centroids(x, 3, seed).flatten().tolist()) for seed in range(5)}
    assert len(starts) == 5
