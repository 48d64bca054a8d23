"""Head sparsity against the conformance kit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import strategies as st

from topkv_head_sparsity.entry import topkv_register_stages
from topkv_testing.stages import Left, StageOptions, StageTests, along_a_line

(ENTRY,) = topkv_register_stages()


def weighed(worth, among):
    """The least flatness of the query heads, and their shares ``[h, n]`` of the closed units.

    Every candidate counts once, and 64 units of all of them, spread evenly, as many times as it
    takes for those that are no candidates.
    """
    closed = worth.shape[1]
    size = min(64, closed)
    others = {(2 * i + 1) * closed // (2 * size) for i in range(size)} - set(among)
    counts = torch.zeros(closed).double()
    counts[among] = 1
    counts[sorted(others)] = (closed - len(among)) / max(len(others), 1)
    log_counts = torch.where(counts > 0, counts, 1).log()
    weights = (worth + log_counts).masked_fill(counts == 0, -math.inf).softmax(-1)
    each = weights / counts.clamp(min=1)
    entropy = torch.special.entr(each) * counts
    return (entropy.sum(-1) / math.log(closed)).min().item(), each


def left(bench, slot, q, lane, among):
    """All candidates, or the share ``head_budget`` of K that rank first of a lane that is flat:
    by means of runs of four keys, which are where 4 bits keep them."""
    group, model = bench.group, bench.model
    params = bench.params
    closed, few = bench.selectable(slot), math.ceil(params.head_budget * group.select)
    keys = bench.keys[slot][: closed * group.unit].double()
    keys = keys.unflatten(1, (group.lane_heads, -1))[:, lane].unflatten(0, (closed, -1))
    queries = q[0].double().unflatten(0, (group.lane_heads, group.heads_per_lane, -1))[lane]
    logits = [
        torch.einsum("kgd,nkd->kgn", queries, run.mean(1)).flatten(0, 1) * model.scale
        + math.log(run.shape[1])
        for run in keys.split(4, dim=1)
    ]
    worth = torch.stack(logits).logsumexp(0)
    if closed <= group.select:
        return Left(worth[:, among].softmax(-1).amax(0), [len(among)])
    flatness, share = weighed(worth, among)
    flat = [params.threshold < 1 and flatness > params.threshold]
    if abs(flatness - params.threshold) < 1e-5:
        flat = [True, False]
    counts = [min(few, len(among)) if each else len(among) for each in flat]
    return Left(share[:, among].amax(0), counts)


OPTIONS = StageOptions(
    params=st.fixed_dictionaries(
        {
            "threshold": st.sampled_from([0.7, 0.3, 0.9, 1.0]),
            "head_budget": st.sampled_from([0.25, 0.5, 1.0]),
        }
    ),
    selects=(2, 3, 5),
    left=left,
    exactly=along_a_line,
)


class TestHeadSparsity(StageTests):
    @pytest.fixture
    def plugin(self):
        return ENTRY

    @pytest.fixture
    def options(self):
        return OPTIONS
