"""Flat lanes and the candidates they keep, against the formula in float64 over what is stored."""

from __future__ import annotations

import math

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from plugins.head_sparsity.tests.test_conformance import ENTRY, OPTIONS, weighed
from plugins.head_sparsity.tests.test_runs import unpacked
from topkv.errors import ConfigError
from topkv.hooks.stage import StageSetup
from topkv_head_sparsity.stage import HeadSparsity
from topkv_testing.algorithm.bench import AlgorithmBench
from topkv_testing.algorithm.case import Case
from topkv_testing.algorithm.cases import cases
from topkv_testing.kit import examples, subject_of
from topkv_testing.machines.lifecycle_model import DIM, HEADS, KV_HEADS, doubles, make_coordinator
from topkv_testing.stage.refine import candidates, filled, refine
from topkv_testing.strategies import Geometry
from topkv_testing.tiers import tier

NEAR = 1e-5
"""Error that entropies and shares may have in fp32."""


@pytest.fixture
def subject(on):
    return subject_of(ENTRY, "stage", on, OPTIONS)


def worth_of(bench, slot, q, head):
    """Worth of each closed unit to each query head of a lane, float64 ``[h, n]``."""
    group, model = bench.group, bench.model
    stored = bench.stored(slot)
    codes, scale = (stored[f"stages[0].{name}"] for name in ("codes", "scale"))
    means = unpacked(codes, scale, model.head_dim)[: bench.selectable(slot)]
    means = means.unflatten(1, (group.lane_heads, -1))[:, head]
    queries = q[0].double().unflatten(0, (group.lane_heads, group.heads_per_lane, -1))[head]
    logits = torch.einsum("kgd,nkrd->kgnr", queries, means).flatten(0, 1) * model.scale
    counts = [min(4, group.unit - first) for first in range(0, group.unit, 4)]
    return (logits + torch.tensor(counts).double().log()).logsumexp(-1)


def assert_left(bench, slot, q, head, among, left):
    """Check what a lane keeps at its places.

    Returns:
        True if the lane is flat, None where rounding decides.
    """
    given_ = bench.params
    select, units = bench.group.select, [unit for unit in among if unit >= 0]
    closed, flatness = bench.selectable(slot), 0.0
    if closed > select:
        flatness, shares = weighed(worth_of(bench, slot, q, head), units)
    if given_.threshold < 1 and abs(flatness - given_.threshold) < NEAR:
        return None
    if flatness <= given_.threshold or given_.threshold == 1:
        assert left == among, f"flatness {flatness}: {left} of {among}"
        return False
    kept = [unit for unit in left if unit >= 0]
    assert left == [unit if unit in kept else -1 for unit in among]
    assert len(kept) == min(len(units), math.ceil(given_.head_budget * select))
    rank = {unit: shares[:, unit].max().item() for unit in units}
    dropped = [rank[unit] for unit in units if unit not in kept]
    if dropped:
        least = min(rank[unit] for unit in kept)
        assert max(dropped) <= least * (1 + NEAR), f"kept are {kept} of {rank}"
    return True


@pytest.mark.slow
def test_flat_lanes_keep_their_share_and_others_everything(subject):
    """Keys are of any kind, in fp16, bf16 and fp32, in ragged batches with rows of padding."""
    seen = []

    @examples(subject.tier, cpu=100, interpret=32, gpu=20)
    @given(case=cases(subject, exact=False), data=st.data())
    def check(case, data):
        bench = AlgorithmBench(subject, case)
        filled(bench, case, data)
        rows = data.draw(st.permutations([*range(bench.requests), -1]))[: bench.requests]
        bench.append(rows, case.tokens(9)[: len(rows)], settle=False)
        q, offered = case.queries(len(rows)), data.draw(candidates(bench, rows))
        found = refine(bench, q, rows, offered)
        for number, (left, among) in enumerate(zip(found, offered.tolist(), strict=True)):
            row, head = divmod(number, bench.group.lane_heads)
            if rows[row] >= 0:
                seen.append(assert_left(bench, rows[row], q[row], head, among, left))
            else:
                assert left == among == [-1] * len(among)

    check()
    assert {True, False} <= set(seen)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_more_units_than_the_sample_and_candidates_of_many_blocks(subject, factor):
    """The threshold is a hundredth off the flatness of the first lane. The second looks for a unit
    that is in no sample."""
    geometry, needle = Geometry(2, 2, 12, 6, 4, "kv_head", torch.float32), 120
    case = Case(geometry, {}, 132, 2, "normal", 5, 200, 96.0, False)
    keys, q = case.tokens(1), case.queries(1)
    keys[needle * 6 : needle * 6 + 4, 1], q[0, 0, 3] = 12 * q[0, 0, 2], q[0, 0, 2]
    order = torch.randperm(199, generator=torch.Generator().manual_seed(1)).tolist()
    order.remove(needle)
    offered = torch.tensor([order[:132], [needle, *order[:131]]]).int()
    bench = AlgorithmBench(subject_of(ENTRY, "stage", tier("cpu")), case)
    bench.prefill(1, keys)
    flatness, _ = weighed(worth_of(bench, 1, q[0], 0), order[:132])
    case = evolve(case, params={"threshold": factor * flatness})
    bench = AlgorithmBench(subject, case)
    bench.prefill(1, keys)
    found = zip(refine(bench, q, [1], offered), offered.tolist(), strict=True)
    flat = [
        assert_left(bench, 1, q[0], head, among, left) for head, (left, among) in enumerate(found)
    ]
    assert flat == [factor < 1, False]


def constant(**settings):
    """A case of one lane whose units are all alike."""
    geometry = Geometry(1, 2, 16, 4, 2, "kv_head", torch.bfloat16)
    return Case(geometry, settings, 20, 2, "constant", 1, 40, float("nan"))


@pytest.mark.parametrize(("share", "count"), [(0.25, 5), (0.26, 6), (0.01, 1), (1.0, 20)])
def test_of_equal_units_the_lowest_are_kept(subject, share, count):
    bench = AlgorithmBench(subject, constant(threshold=0.99, head_budget=share))
    bench.prefill(0, bench.case.tokens(0))
    offered = torch.arange(30, 10, -1, dtype=torch.int32)[None]
    (left,) = refine(bench, bench.case.queries(1), [0], offered)
    assert left == [*[-1] * (20 - count), *range(10 + count, 10, -1)]


def test_one_sharp_head_keeps_what_its_lane_is_given(subject):
    """All other heads of the lane are flat."""
    geometry = Geometry(1, 4, 16, 1, 2, "kv_head", torch.float32)
    case = Case(geometry, {"threshold": 0.6}, 4, 2, "constant", 1, 12, float("nan"))
    bench = AlgorithmBench(subject, case)
    keys = torch.zeros(12, 1, 16)
    keys[5, 0, 0] = 8
    bench.prefill(0, keys)
    q, offered = torch.zeros(1, 1, 4, 16), torch.tensor([[9, 5, 3, 2]], dtype=torch.int32)
    assert refine(bench, q, [0], offered) == [[-1, -1, -1, 2]]
    q[0, 0, 2, 0] = 4
    assert refine(bench, q, [0], offered) == offered.tolist()


def test_what_k_covers_is_left(subject):
    """Lanes of one batch are judged each by its own closed units."""
    bench = AlgorithmBench(subject, constant(threshold=0.5, head_budget=0.1), requests=3)
    for slot, length in ((0, 20 * 4 + 1), (2, 21 * 4 + 1)):
        bench.prefill(slot, bench.case.tokens(slot)[:length])
    offered = torch.stack([torch.arange(20), torch.full((20,), -1), torch.arange(20)]).int()
    found = refine(bench, bench.case.queries(3), [0, -1, 2], offered)
    assert found == [[*range(20)], [-1] * 20, [0, 1, *[-1] * 18]]


@pytest.mark.slow
@pytest.mark.parametrize(("threshold", "share"), [(1, 0.25), (0.01, 1)])
def test_candidates_are_left_as_they_are(subject, threshold, share):
    neutral = {"threshold": threshold, "head_budget": share}

    @examples(subject.tier, cpu=30, interpret=3, gpu=10)
    @given(case=cases(subject), data=st.data(), factor=st.sampled_from((1, 1000, 0)))
    def check(case, data, factor):
        bench = AlgorithmBench(subject, evolve(case, params=neutral))
        filled(bench, case, data)
        rows = data.draw(st.permutations([0, 1, -1]))
        offered = data.draw(candidates(bench, rows))
        assert refine(bench, case.queries(3) * factor, rows, offered) == offered.tolist()

    check()


@pytest.mark.parametrize("closed", [140])
def test_rounding_makes_no_lane_flatter_than_flat(subject, closed):
    """The entropy of these counts of equal units is a little above its maximum in fp32."""
    case = evolve(constant(threshold=1), select=2, least_units=160)
    bench = AlgorithmBench(subject, case)
    bench.prefill(0, case.tokens(0)[: closed * 4 + 1])
    offered = torch.tensor([[1, 0]], dtype=torch.int32)
    assert refine(bench, case.queries(1) * 0, [0], offered) == [[1, 0]]


def run(on, stages):
    """Outputs of a request of a coordinator of doubles, and what went over the link."""
    made = make_coordinator(on, registry=doubles(ENTRY), stages=stages)
    generator, outs = torch.Generator().manual_seed(3), []
    scripted = made.layers[0].algorithm
    scripted = getattr(scripted, "algorithm", scripted)
    slot = made.request_begin()
    for count in (21, *[1] * 6):
        q, k, v = (
            torch.randn(4, count, heads, DIM, generator=generator).to(on.device)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        for layer in (0, 3):
            scripted.next_ids[layer] = torch.tensor([[5, -1, 2], [7, 8, 1]], dtype=torch.int32)
        made.forward_begin(**({"decode": [slot]} if count == 1 else {"prefill": [(slot, count)]}))
        outs += [made.attention(layer, q[layer], k[layer], v[layer]).cpu() for layer in range(4)]
        made.forward_end()
    counts = made.transfers_of()
    made.close()
    return torch.cat(outs), counts


@pytest.mark.slow
def test_a_neutral_stage_changes_no_bit_of_a_decode(on):
    """A stage that is not neutral changes some, and loads less."""
    stage = {"name": "head_sparsity", "params": {"threshold": 1}}
    (one, counts), (two, same) = (run(on, stages) for stages in ([], [stage]))
    assert torch.equal(one, two)
    assert counts == same
    less, fewer = run(on, [{"name": "head_sparsity", "params": {"threshold": 0.01}}])
    assert not torch.equal(one, less)
    assert fewer.misses < counts.misses


def test_wrong_parameters_are_refused_with_every_reason(subject):
    bench = AlgorithmBench(subject, constant())
    model = evolve(bench.model, softcap=30.0)
    with pytest.raises(ConfigError) as error:
        subject.params({"threshold": True, "head_budget": 0})
    one, two = error.value.reasons
    assert one == "parameter threshold of head_sparsity must be a number, got True"
    assert two == "parameter head_budget of head_sparsity must be > 0, got 0"
    setup = StageSetup(model, bench.group, subject.params({}), bench.device)
    with pytest.raises(ConfigError, match="softcap"):
        HeadSparsity(setup)
