"""Clusters of keys: what the paper says of them, in float64 or exactly."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from topkv_clusterkv.kmeans import GRID, assign, kmeans, means, spread, unit_vectors
from topkv_testing.strategies import KEYS, key_kinds, seeds

HEADS, DIM = 2, 8


def keys_of(kind, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    return KEYS[kind]((HEADS, tokens, DIM), generator).bfloat16().float()


def cosines(keys, centroids):
    """float64 ``[h, n, C]``; 0 where a vector is 0."""
    keys, centroids = (
        x.double() / x.double().norm(dim=-1, keepdim=True) for x in (keys, centroids)
    )
    return (keys.nan_to_num() @ centroids.nan_to_num().transpose(1, 2)).nan_to_num()


@st.composite
def problems(draw):
    tokens = draw(st.integers(1, 60))
    clusters = draw(st.integers(1, tokens))
    return keys_of(draw(key_kinds()), tokens, draw(seeds())), clusters, draw(st.integers(0, 9))


@given(problem=problems(), iterations=st.integers(1, 5))
def test_clusters_partition_the_keys_and_are_the_means_of_their_members(problem, iterations):
    keys, clusters, seed = problem
    first = spread(keys.shape[1], clusters, seed)
    assert len(set(first.tolist())) == clusters
    assert 0 <= first.min() <= first.max() < keys.shape[1]
    labels, centroids, sizes = kmeans(keys, first, iterations)
    assert torch.isfinite(centroids).all()
    assert (sizes.sum(1) == keys.shape[1]).all()
    for head in range(HEADS):
        count = torch.bincount(labels[head], minlength=clusters)
        assert torch.equal(count, sizes[head].long())
        for c in torch.nonzero(count).flatten().tolist():
            members = keys[head, labels[head] == c]
            true = members.double().mean(0)
            bound = 2**-20 * members.double().abs().mean(0).max()
            assert (centroids[head, c].double() - true).abs().max() <= bound


@given(problem=problems())
def test_a_fixed_point_labels_by_the_nearest_final_centroid(problem):
    keys, clusters, seed = problem
    labels, centroids, _ = kmeans(keys, spread(keys.shape[1], clusters, seed), 60)
    by = cosines(keys, centroids)
    own = by.gather(2, labels[..., None])[..., 0]
    assert (own >= by.amax(2) - 2 / GRID).all()


@given(problem=problems(), exponents=st.integers(-10, 10))
def test_the_length_of_a_key_does_not_matter_to_its_label(problem, exponents):
    keys, clusters, seed = problem
    centroids = keys[:, spread(keys.shape[1], clusters, seed)]
    generator = torch.Generator().manual_seed(seed)
    lengths = 2.0 ** torch.randint(-5, 6, (HEADS, keys.shape[1], 1), generator=generator)
    lengths = lengths * 2.0**exponents
    expected = assign(unit_vectors(keys), centroids)
    assert torch.equal(assign(unit_vectors(keys * lengths), centroids), expected)
    by = cosines(keys, centroids)
    own = by.gather(2, expected[..., None])[..., 0]
    assert (own >= by.amax(2) - 2 / GRID).all()


@given(problem=problems(), copies=st.integers(2, 3))
def test_identical_and_parallel_keys_share_a_cluster(problem, copies):
    keys, clusters, seed = problem
    keys = torch.cat([keys * 3.0**copy for copy in range(copies)], 1)
    labels, _, _ = kmeans(keys, spread(keys.shape[1], clusters, seed), 4)
    tokens = keys.shape[1] // copies
    for copy in range(1, copies):
        assert torch.equal(labels[:, :tokens], labels[:, copy * tokens : (copy + 1) * tokens])


@given(problem=problems())
def test_the_same_seed_gives_the_same_bits_and_heads_do_not_see_each_other(problem):
    keys, clusters, seed = problem
    first = spread(keys.shape[1], clusters, seed)
    once, again = kmeans(keys, first, 3), kmeans(keys, first, 3)
    flipped = kmeans(keys.flip(0), first, 3)
    for one, two, three in zip(once, again, flipped, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three.flip(0))


def test_another_seed_starts_elsewhere():
    starts = {tuple(spread(8192, 103, seed).tolist()) for seed in range(5)}
    assert len(starts) == 5


def test_keys_that_are_all_alike_leave_empty_clusters_without_nan():
    keys = torch.ones(1, 40, DIM)
    labels, centroids, sizes = kmeans(keys, spread(40, 9, 0), 10)
    assert (labels == 0).all()
    assert sizes[0].tolist() == [40.0] + [0.0] * 8
    assert torch.equal(centroids, torch.ones(1, 9, DIM))
    zeros = kmeans(keys * 0, spread(40, 9, 0), 10)
    assert all(torch.isfinite(result.double()).all() for result in zeros)


def test_an_empty_cluster_starts_again_at_the_key_that_fits_worst():
    """One key that points away, and no first centroid there: it still gets a cluster."""
    keys = torch.ones(1, 41, DIM)
    keys[0, 17] *= -4
    first = spread(41, 5, 0)
    assert 17 not in first.tolist()
    labels, _, sizes = kmeans(keys, first, 3)
    assert sizes[0, labels[0, 17]] == 1


def test_means_of_no_members_are_zero():
    centre, sizes = means(torch.ones(1, 3, 2), torch.tensor([[0, 2, 2]]), 4)
    assert sizes.tolist() == [[1, 0, 2, 0]]
    assert centre[0, 1].tolist() == [0, 0]
