"""Candidates that are kept, against the formula in float64 over what is stored."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from plugins.top_p.tests.test_conformance import ENTRY, OPTIONS
from plugins.top_p.tests.test_keys import unpacked
from topkv.errors import ConfigError
from topkv.hooks.stage import StageSetup
from topkv_testing.algorithm.bench import AlgorithmBench
from topkv_testing.algorithm.case import Case
from topkv_testing.algorithm.cases import cases
from topkv_testing.kit import examples, subject_of
from topkv_testing.machines.lifecycle_model import DIM, HEADS, KV_HEADS, doubles, make_coordinator
from topkv_testing.models.oracle import attention
from topkv_testing.stage.refine import candidates, filled, refine
from topkv_testing.strategies import Geometry
from topkv_testing.tolerance import assert_as_good
from topkv_top_p import launch
from topkv_top_p.stage import TopP

NEAR = 1e-5
"""Error that sums and ranks may have in fp32."""


@pytest.fixture
def subject(on):
    return subject_of(ENTRY, "stage", on, OPTIONS)


def shares(bench, slot, q, head, among):
    """Share of each of these candidates for each query head of a lane, float64 ``[h, n]``."""
    group, model = bench.group, bench.model
    stored = bench.stored(slot)
    kept = (stored[f"stages[0].{name}"] for name in ("codes", "meta", "outliers"))
    keys = unpacked(*kept, model.head_dim)[0].unflatten(1, (group.lane_heads, -1))[:, head]
    queries = q[0].double().unflatten(0, (group.lane_heads, group.heads_per_lane, -1))[head]
    logits = torch.einsum("kgd,tkd->kgt", queries, keys).flatten(0, 1) * model.scale
    tokens = torch.tensor(among)[:, None] * group.unit + torch.arange(group.unit)
    return logits[:, tokens].logsumexp(-1).softmax(-1)


def params(bench):
    """p and K of a bench."""
    return bench.params.p, bench.group.select


def assert_kept(bench, share, among, kept):
    """Check that the first by rank are kept, up to the one with which every head has p, or K."""
    p, most = params(bench)
    rank = dict(zip(among, share.amax(0).tolist(), strict=True))
    order = sorted(kept, key=lambda unit: (-rank[unit], unit))
    dropped = [rank[unit] for unit in among if unit not in kept]
    if dropped and kept:
        assert max(dropped) <= rank[order[-1]] * (1 + NEAR), f"{order} of {rank}"
    assert len(kept) <= most

    def least(units):
        return share[:, [among.index(unit) for unit in units]].sum(-1).min().item()

    if p == 1:
        assert len(kept) == min(most, len(among))
        return
    full = len(kept) == min(most, len(among))
    assert full or least(kept) >= p - NEAR, f"{kept} have {least(kept)} of {rank}, less than {p}"
    fewer = least(order[:-1]) if among else 0
    assert not among or fewer < p + NEAR, f"{order} of {rank}: all but the last have {fewer}"


@pytest.mark.slow
def test_what_is_kept_has_the_share_p_and_no_more_units_than_that_takes(subject):
    """Keys are of any kind, in fp16, bf16 and fp32, in ragged batches with rows of padding."""

    @examples(subject.tier, cpu=100, interpret=8, gpu=20)
    @given(case=cases(subject, exact=False), data=st.data())
    def check(case, data):
        bench = AlgorithmBench(subject, case)
        filled(bench, case, data)
        rows = data.draw(st.permutations([*range(bench.requests), -1]))[: bench.requests]
        bench.append(rows, case.tokens(9)[: len(rows)], settle=False)
        q, offered = case.queries(len(rows)), data.draw(candidates(bench, rows))
        found = refine(bench, q, rows, offered)
        lanes = bench.group.lane_heads
        for number, (left, given_) in enumerate(zip(found, offered.tolist(), strict=True)):
            row, head = divmod(number, lanes)
            kept, among = ([unit for unit in each if unit >= 0] for each in (left, given_))
            if rows[row] < 0 or not among:
                assert not kept
                continue
            assert_kept(bench, shares(bench, rows[row], q[row], head, among), among, kept)

    check()


@pytest.mark.parametrize("widen", [1, 3])
def test_candidates_of_many_blocks(subject, widen, monkeypatch):
    """Candidates fill many blocks of both kernels, and some of each block are kept."""
    monkeypatch.setattr(launch, "TOKENS", 32)
    monkeypatch.setattr(launch, "PAIRS", 32)
    geometry = Geometry(2, 2, 12, 2, 4, "kv_head", torch.float32)
    settings = {"p": 0.8 if widen == 1 else 0.5, "widen": widen}
    case = Case(geometry, settings, 120 // widen, 2, "normal", 5, 140, 96.0, False)
    bench, generator = AlgorithmBench(subject, case, requests=2), torch.Generator().manual_seed(1)
    bench.prefill(1, case.tokens(1))
    q = case.queries(1)
    offered = torch.stack([torch.randperm(139, generator=generator)[:120] for _ in range(2)]).int()
    found = refine(bench, q, [1], offered)
    for head, (left, among) in enumerate(zip(found, offered.tolist(), strict=True)):
        kept = [unit for unit in left if unit >= 0]
        assert 10 < len(kept) < case.select
        assert_kept(bench, shares(bench, 1, q[0], head, among), among, kept)
        assert left == (
            [unit if unit in kept else -1 for unit in among]
            if widen == 1
            else [*(unit for unit in among if unit in kept), *[-1] * (case.select - len(kept))]
        )


@pytest.mark.slow
def test_a_larger_p_keeps_what_a_smaller_one_keeps(subject):
    @examples(subject.tier, cpu=60, interpret=4, gpu=10)
    @given(case=cases(subject, exact=False), data=st.data(), widen=st.integers(1, 3))
    def check(case, data, widen):
        rows, q, offered = [0, 1, 2], case.queries(3), None
        before = None
        for p in (0.1, 0.5, 0.9, 1.0):
            bench = AlgorithmBench(subject, evolve(case, params={"p": p, "widen": widen}))
            for slot in rows:
                bench.prefill(slot, case.tokens(slot)[: case.most - slot])
            if offered is None:
                offered = data.draw(candidates(bench, rows))
            now = [set(lane) - {-1} for lane in refine(bench, q, rows, offered)]
            for few, many in zip(before or now, now, strict=True):
                assert few <= many, f"p = {p} keeps {many}, a smaller one {few}"
            before = now

    check()


@pytest.mark.slow
def test_with_p_of_1_candidates_are_left_as_they_are(subject):
    """Candidates stay at their places, also those without weight, where none has to go."""

    @examples(subject.tier, cpu=60, interpret=5, gpu=10)
    @given(case=cases(subject), data=st.data(), factor=st.sampled_from((1, 1000)))
    def check(case, data, factor):
        bench = AlgorithmBench(subject, evolve(case, params={"p": 1, "widen": 1}))
        filled(bench, case, data)
        rows = data.draw(st.permutations([0, 1, -1]))
        offered = data.draw(candidates(bench, rows))
        assert refine(bench, case.queries(3) * factor, rows, offered) == offered.tolist()

    check()


def constant(**settings):
    """A case of one lane whose units are all alike."""
    geometry = Geometry(1, 2, 16, 4, 2, "kv_head", torch.bfloat16)
    return Case(geometry, settings, 8, 2, "constant", 1, 40, float("nan"))


@pytest.mark.parametrize(("p", "count"), [(0.5, 10), (0.51, 11), (0.05, 1), (0.95, 19)])
def test_of_equal_units_the_lowest_are_kept(subject, p, count):
    """Only as many units as needed are kept: weights of equal units are 1, their sums exact."""
    bench = AlgorithmBench(subject, evolve(constant(p=p, widen=1), select=20))
    bench.prefill(0, bench.case.tokens(0))
    offered = torch.arange(30, 10, -1, dtype=torch.int32)[None]
    kept = sorted(
        unit for unit in refine(bench, bench.case.queries(1), [0], offered)[0] if unit >= 0
    )
    assert kept == list(range(11, 11 + count))


def test_no_more_are_kept_than_there_are_places(subject):
    """Units move up in the order in which they came; with p = 1 there are K of them."""
    for p, most in ((1, 8), (0.95, 8), (0.25, 6)):
        bench = AlgorithmBench(subject, constant(p=p, widen=3))
        bench.prefill(0, bench.case.tokens(0))
        offered = torch.arange(30, 6, -1, dtype=torch.int32)[None]
        (left,) = refine(bench, bench.case.queries(1), [0], offered)
        assert left == [*range(6 + most, 6, -1), *[-1] * (8 - most)]


def test_every_query_head_has_its_share(subject):
    """Two heads that look for different units keep both, though one of them is surer."""
    geometry = Geometry(1, 2, 16, 1, 2, "kv_head", torch.float32)
    case = Case(geometry, {"p": 0.5, "widen": 1}, 4, 2, "constant", 1, 8, float("nan"))
    bench = AlgorithmBench(subject, case)
    keys = torch.zeros(8, 1, 16)
    keys[2, 0, 0], keys[5, 0, 1] = 8, 8
    bench.prefill(0, keys)
    q = torch.zeros(1, 1, 2, 16)
    q[0, 0, 0, 0], q[0, 0, 1, 1] = 4, 1.5
    offered = torch.tensor([[5, 1, 3, 2]], dtype=torch.int32)
    assert refine(bench, q, [0], offered) == [[5, -1, -1, 2]]


def run(on, stages):
    """Outputs, selections, keys and values of a request of a coordinator of doubles."""
    registry = doubles(ENTRY)
    made = make_coordinator(on, registry=registry, stages=stages)
    generator, outs, chosen = torch.Generator().manual_seed(3), [], []
    slot, held = made.request_begin(), []
    scripted = made.layers[0].algorithm
    scripted = getattr(scripted, "algorithm", scripted)
    for count in (21, *[1] * 6):
        q, k, v = (
            torch.randn(4, count, heads, DIM, generator=generator).to(on.device)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        held.append((q, k, v))
        for layer in (0, 3):
            scripted.next_ids[layer] = torch.tensor([[5, -1, 2], [7, 8, 1]], dtype=torch.int32)
        made.forward_begin(**({"decode": [slot]} if count == 1 else {"prefill": [(slot, count)]}))
        for layer in range(4):
            out = made.attention(layer, q[layer], k[layer], v[layer])
            if count == 1:
                outs.append(out.cpu())
                chosen.append(
                    made.layers[layer].lanes.selection.ids.tolist() if layer in (0, 3) else None
                )
        made.forward_end()
    counts = made.transfers_of()
    made.close()
    return (
        torch.cat(outs),
        chosen,
        [torch.cat(each, 1).cpu() for each in zip(*held, strict=True)],
        counts,
    )


@pytest.mark.slow
def test_a_neutral_stage_changes_no_bit_of_a_decode(on):
    (one, ids, _, counts), (two, again, _, same) = (
        run(on, stages) for stages in ([], [{"name": "top_p", "params": {"p": 1}}])
    )
    assert torch.equal(one, two)
    assert ids == again
    assert counts == same
    assert counts.misses > 0


def test_a_decode_attends_what_is_kept_and_the_tail(on):
    outs, chosen, (q, k, v), _ = run(on, [{"name": "top_p", "params": {"p": 0.5}}])
    holes = 0
    for number, (out, ids) in enumerate(zip(outs, chosen, strict=True)):
        step, layer = divmod(number, 4)
        if ids is None:
            continue
        length = 22 + step
        for lane, units in enumerate(ids):
            holes += units.count(-1) - (lane == 0)
            tokens = [2 * unit + i for unit in units if unit >= 0 for i in range(2)]
            tokens += range((length - 1) // 2 * 2, length)
            group = HEADS // KV_HEADS
            heads = slice(lane * group, lane * group + group)
            query = q[layer, length - 1, heads][None]
            key, value = (x[layer, tokens, lane][:, None].expand(-1, group, -1) for x in (k, v))
            truth = attention(query, key, value, DIM**-0.5)[0][0]
            weights = (torch.einsum("hd,nhd->hn", query[0], key) * DIM**-0.5).softmax(-1)
            rough = torch.einsum("hn,nhd->hd", weights, value)
            assert_as_good(out[heads], truth, rough, f"layer {layer}, lane {lane}")
    assert holes > 5, "the stage drops nothing, so nothing is shown"


def test_wrong_parameters_are_refused_with_every_reason(subject):
    bench = AlgorithmBench(subject, constant())
    model = evolve(bench.model, softcap=30.0, head_dim=1025)
    with pytest.raises(ConfigError) as error:
        subject.params({"p": 0, "widen": 1.5, "outliers": 9})
    assert [*error.value.reasons] == [
        "parameter p of top_p must be > 0, got 0",
        "parameter widen of top_p must be an int, got 1.5",
        "parameter outliers of top_p must be <= 8, got 9",
    ]
    with pytest.raises(ConfigError) as error:
        TopP(StageSetup(model, bench.group, subject.params({}), bench.device))
    one, two = error.value.reasons
    assert "1024 channels" in one
    assert "softcap" in two
