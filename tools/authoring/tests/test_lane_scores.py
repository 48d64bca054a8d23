"""Scores of lanes made of scores of heads, against ``ScoredUnits.combine`` in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topkv.types import GroupShape, ModelShape, StepTensors
from topkv_authoring.lane_scores import HeadScores
from topkv_authoring.selectors import ScoredUnits
from topkv_testing.tiers import tier

PAGE, PAGES, KV_HEADS = 16, 5, 2


@st.composite
def cases(draw):
    """Group size, lanes of a row, unit, block, lengths and slots of the rows, forced units."""
    unit = draw(st.sampled_from([1, 2, 8]))
    rows = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, PAGE * PAGES), min_size=rows, max_size=rows))
    slots = draw(st.permutations(range(3)))[:rows]
    if draw(st.booleans()):
        slots[0], lengths[0] = -1, 0
    return (
        draw(st.sampled_from([1, 2, 3])),
        draw(st.sampled_from([1, KV_HEADS])),
        unit,
        draw(st.sampled_from([1, 4, 7, 64])),
        lengths,
        slots,
        draw(st.integers(0, 4)),
        draw(st.integers(0, 4)),
        draw(st.sampled_from([1.0, 30.0, 1e4])),
        draw(st.integers(0, 2**31)),
    )


@pytest.mark.parametrize("name", ["interpret", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_lanes_get_the_log_of_the_sum_of_softmaxes(name):
    if tier(name).missing:
        pytest.skip(tier(name).missing)
    where = tier(name).device

    @given(cases())
    def check(case):
        group_size, lanes, unit, block, lengths, slots, sinks, recent, spread, seed = case
        heads = KV_HEADS * group_size
        model = ModelShape(1, heads, KV_HEADS, 64, torch.float32, 0.125)
        group = GroupShape(
            layers=(0,),
            unit=unit,
            lane_heads=lanes,
            heads_per_lane=KV_HEADS // lanes,
            head_dim=64,
            dtype=torch.float32,
            page_tokens=PAGE,
            max_requests=3,
            max_units=PAGES * PAGE // unit,
            select=4,
            buffer_slots=8,
            ring_slots=2,
        )
        ints = {"dtype": torch.int32, "device": where}
        length, slot = torch.tensor(lengths, **ints), torch.tensor(slots, **ints)
        step = StepTensors(slot, length, length, length, length, torch.zeros(3, PAGES, **ints))
        closed = [
            max(n - 1, 0) // unit if s >= 0 else 0 for n, s in zip(lengths, slots, strict=True)
        ]
        scratch = HeadScores(model, group, block, where)
        for tensor in (scratch.raw, scratch.peak, scratch.mass, scratch.scores):
            tensor.fill_(float("nan"))
        draw = torch.Generator().manual_seed(seed)
        raw = spread * torch.randn(len(slots), heads, group.max_units, generator=draw)
        for row, count in enumerate(closed):
            at = slice(row * heads, row * heads + heads)
            scratch.raw[at, :count] = raw[row, :, :count].to(where)
            for b, part in enumerate(raw[row, :, :count].split(block, 1) if count else ()):
                peak = part.amax(1)
                scratch.peak[at, b] = peak.to(where)
                scratch.mass[at, b] = (part - peak[:, None]).exp().sum(1).to(where)
        scores, counts = scratch.lanes(step, sinks, recent)
        assert counts.tolist() == [count for count in closed for _ in range(lanes)]
        for lane, count in enumerate(counts.tolist()):
            each = raw[lane // lanes].unflatten(0, (lanes, -1))[lane % lanes, :, :count]
            expected = ScoredUnits.combine(None, each[None, None].double())[0, 0]
            expected[: min(sinks, count)] = torch.inf
            expected[max(count - recent, 0) :] = torch.inf
            ours = scores[lane, :count].double().cpu()
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)

    check()
