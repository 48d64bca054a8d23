"""ParisKV against the conformance kit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from topkv_authoring.outliers import split
from topkv_authoring.selectors import ends_of
from topkv_testing.algorithms import AlgorithmOptions, AlgorithmTests


def forced(length, bench):
    """The first ``sink_units`` and the last ``recent_units`` of the selectable tokens."""
    params = bench.params
    tokens = range(length - 1)
    sinks, recent = ends_of(params, bench.group.select)
    return {*tokens[:sinks], *tokens[max(0, length - 1 - recent) :]}


def hadamard(size):
    """Sylvester's matrix, float64 ``[size, size]``."""
    made = torch.ones(1, 1, dtype=torch.float64)
    while len(made) < size:
        made = torch.cat([torch.cat([made, made], 1), torch.cat([made, -made], 1)])
    return made


def oracle(bench, slot, q):
    """``q . (k - r) + |r|^2 / |z(r)|_1 * sign(z(r)) . z(q)`` with the rest r of a key, softmaxed,
    the mean over the query heads of a lane.
    """
    group, model = bench.group, bench.model
    signs = bench.algorithm.signs.double().cpu()
    rotation = (hadamard(len(signs)) * signs)[:, : group.head_dim]
    keys = bench.keys[slot][: bench.selectable(slot)]
    rest = split(keys, bench.algorithm.params.outliers)[1].double()
    z = rest @ rotation.T
    length = z.abs().sum(-1)
    factor = rest.square().sum(-1) / torch.where(length > 0, length, 1.0)
    heads = q[0].double().unflatten(0, (group.num_kv_heads, -1))
    signs = torch.where(z < 0, -1.0, 1.0).double()
    products = torch.einsum("nhd,hgd->nhg", signs, heads @ rotation.T)
    scores = products * factor.bfloat16().double()[..., None]
    scores += torch.einsum("nhd,hgd->nhg", keys.double() - rest, heads)
    scores *= model.scale
    weights = scores.softmax(0).flatten(1, 2).unflatten(1, (group.lane_heads, -1))
    return weights.mean(-1).T


OPTIONS = AlgorithmOptions(
    params=st.fixed_dictionaries(
        {
            "sink_units": st.integers(0, 1),
            "recent_units": st.integers(0, 1),
            "outliers": st.integers(1, 4),
        }
    ),
    promised=forced,
    selects=(2, 3, 5),
    hidden_needles=True,
    head_needles=True,
    oracle=oracle,
)


class TestParisKV(AlgorithmTests):
    @pytest.fixture
    def plugin(self):
        return "pariskv"

    @pytest.fixture
    def options(self):
        return OPTIONS
