"""PQCache against the conformance kit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from topkv_authoring.selectors import ends_of
from topkv_testing.algorithms import AlgorithmOptions, AlgorithmTests


def forced(length, bench):
    """The first ``sink_units`` and the last ``recent_units`` of the selectable tokens."""
    params = bench.params
    tokens = range(length - 1)
    sinks, recent = ends_of(params, bench.group.select)
    return {*tokens[:sinks], *tokens[max(0, length - 1 - recent) :]}


def oracle(bench, slot, q):
    """q·k of what the codes stand for, and of the keys behind them, softmaxed, the mean over the
    query heads of a lane.
    """
    group, model, pools = bench.group, bench.model, bench.pools
    books, coded = pools["state"][slot].tolist()
    starts = pools["starts"][slot, :books].tolist()
    length = bench.selectable(slot)
    keys = bench.keys[slot][:length].double()
    codes, centroids = pools["codes"][slot].cpu(), pools["centroids"][slot].cpu().double()
    for token in range(min(coded, length)):
        book = sum(start <= token for start in starts) - 1
        for head in range(group.num_kv_heads):
            own = zip(centroids[head, book], codes[head, token].tolist(), strict=True)
            keys[token, head] = torch.cat([part[code] for part, code in own])
    heads = q[0].double().unflatten(0, (group.num_kv_heads, -1))
    scores = torch.einsum("nhd,hgd->nhg", keys, heads) * model.scale
    weights = scores.softmax(0).flatten(1, 2).unflatten(1, (group.lane_heads, -1))
    return weights.mean(-1).T


OPTIONS = AlgorithmOptions(
    params=st.fixed_dictionaries(
        {
            "subvectors": st.sampled_from([1, 2, 4]),
            "bits": st.sampled_from([3, 4, 6]),
            "window": st.integers(4, 7),
            "segment": st.sampled_from([14, 20, 64]),
            "iterations": st.just(3),
            "sink_units": st.integers(0, 1),
            "recent_units": st.integers(0, 1),
        }
    ),
    promised=forced,
    selects=(2, 3, 5),
    units=24,
    hidden_needles=True,
    head_needles=True,
    oracle=oracle,
)


class TestPQCache(AlgorithmTests):
    @pytest.fixture
    def plugin(self):
        return "pqcache"

    @pytest.fixture
    def options(self):
        return OPTIONS
