"""Sticky selection: both implementations against the definition, and whole decodes with it."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
import torch
from attrs import evolve, field, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from topkv.errors import ConfigError

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tools.authoring.tests.test_selectors import ENTRY, Ends  # noqa: E402
from topkv.types import GroupShape, LayerView, StepTensors  # noqa: E402
from topkv_authoring import parameters  # noqa: E402
from topkv_authoring.sticky import prefer_resident, resident  # noqa: E402
from topkv_testing.integrity import check_integrity  # noqa: E402
from topkv_testing.kit import params_of  # noqa: E402
from topkv_testing.machines.lifecycle_model import (  # noqa: E402
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    doubles,
    make_coordinator,
)
from topkv_testing.tiers import tier  # noqa: E402

NEEDS_GPU = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
CASES = [
    ("reference", "cpu"),
    pytest.param("reference", "cuda", marks=[pytest.mark.gpu, NEEDS_GPU]),
    pytest.param("triton", "cuda", marks=[pytest.mark.gpu, NEEDS_GPU]),
]
if not CUDA:
    CASES.append(("triton", "cpu"))
MARGIN, POISON, BONUS = 5, -777.0, 0.375
SLOTS = 3


def view(device, *, unit=4, each=1, units=12, heads=2, ring=2, batch=3):
    """Make a layer whose algorithm has ``each`` units in a stored one of ``unit`` tokens."""
    group = GroupShape(
        layers=(0,),
        unit=unit // each,
        lane_heads=heads,
        heads_per_lane=1,
        head_dim=8,
        dtype=torch.float32,
        page_tokens=2 * unit,
        max_requests=SLOTS,
        max_units=units * each,
        select=4,
        buffer_slots=8 * each,
        ring_slots=ring * each,
    )
    steps = torch.zeros((5, batch), dtype=torch.int32, device=device)
    step = StepTensors(*steps, page_table=torch.zeros((SLOTS, 9), dtype=torch.int32))
    held = torch.full((SLOTS * heads, units), -1, dtype=torch.int32, device=device)
    none = torch.zeros(0)
    return LayerView(0, 0, group, step, none, none, {}, held)


def fill(layer, seed, rows):
    """Write rows ``(slot, length, most tokens ever)``, and maps with half of the units."""
    generator = torch.Generator().manual_seed(seed)
    maps = torch.randint(-1, 1, layer.held.shape, generator=generator, dtype=torch.int32)
    layer.held.copy_(maps * torch.randint(1, 9, layer.held.shape, generator=generator).int())
    layer.held.clamp_(min=-1)
    for row, (slot, length, high) in enumerate(rows):
        for name, value in (("slots", slot), ("lengths", length), ("high", high)):
            getattr(layer.step, name)[row] = value


def definition(layer):
    """Pairs (lane, unit of the algorithm) that are selectable and resident, by a plain loop."""
    group, found = layer.group, set()
    each = group.max_units // layer.held.shape[1]
    tokens, ring = group.unit * each, group.ring_slots // each
    for row in range(layer.step.batch):
        slot, length = int(layer.step.slots[row]), int(layer.step.lengths[row])
        newest = (int(layer.step.high[row]) - 1) // tokens
        for head in range(group.lane_heads if slot >= 0 else 0):
            lane = layer.held[slot * group.lane_heads + head].tolist()
            for unit in range((length - 1) // group.unit):
                stored = unit * group.unit // tokens
                if lane[stored] >= 0 or newest - ring < stored <= newest:
                    found.add((row * group.lane_heads + head, unit))
    return found


def counts_of(layer):
    closed = (layer.step.lengths - 1).clamp(min=0) // layer.group.unit * (layer.step.slots >= 0)
    return closed.repeat_interleave(layer.group.lane_heads)


def scores_for(layer, seed):
    """Make scores with every special value among them, in a wider tensor; rows of a lane."""
    lanes = layer.step.batch * layer.group.lane_heads
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn((lanes, layer.group.max_units), generator=generator)
    for value in (torch.inf, -torch.inf, torch.nan):
        scores[torch.rand(scores.shape, generator=generator) < 0.1] = value
    whole = torch.full((lanes, scores.shape[1] + MARGIN), POISON, device=layer.held.device)
    whole[:, :-MARGIN] = scores.to(whole.device)
    return whole, whole[:, :-MARGIN]


def check(impl, layer, seed):
    """Check that the call adds the bonus where the definition does, and nowhere else."""
    whole, scores = scores_for(layer, seed)
    expected = whole.cpu().clone()
    for lane, unit in definition(layer):
        expected[lane, unit] += BONUS
    prefer_resident(layer, scores, counts_of(layer), BONUS, impl=impl)
    torch.testing.assert_close(whole.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@st.composite
def layers(draw, device):
    unit, each = draw(st.sampled_from([(1, 1), (4, 1), (4, 4), (16, 16)]))
    units, ring = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    slots = draw(st.permutations(range(SLOTS)))[: draw(st.integers(1, SLOTS))]
    rows = []
    for slot in slots:
        length = draw(st.integers(1, units * unit))
        high = draw(st.integers(length, min(units * unit, length + 2 * unit)))
        rows.append((slot, length, high) if draw(st.integers(0, 3)) else (-1, 0, 0))
    heads = draw(st.integers(1, 3))
    layer = view(
        device, unit=unit, each=each, units=units, heads=heads, ring=ring, batch=len(rows)
    )
    fill(layer, draw(st.integers(0, 2**31)), rows)
    return layer


@pytest.mark.parametrize(("impl", "device"), CASES)
def test_any_residency(impl, device):
    @settings(deadline=None, max_examples=60)
    @given(layers(device), st.integers(0, 2**31))
    def inner(layer, seed):
        check(impl, layer, seed)

    inner()


@pytest.mark.parametrize(("impl", "device"), CASES)
@pytest.mark.parametrize("units", [1023, 1024, 1025, 2500])
def test_more_than_a_block(impl, device, units):
    layer = view(device, units=units)
    edges = [4096, 4096 - 3, 4 * units]
    fill(layer, units, [(2, edges[0], edges[0]), (-1, 0, 0), (0, edges[2], edges[2])])
    check(impl, layer, units)


@pytest.mark.parametrize(("impl", "device"), CASES)
def test_a_request_that_was_rolled_back_has_lost_the_ring_that_was_overwritten(impl, device):
    layer = view(device, heads=1, ring=2, batch=1)
    fill(layer, 0, [(1, 17, 21)])
    layer.held.fill_(-1)
    assert definition(layer) == set(), "units 4 and 5 are in the ring, and 4 are closed"
    check(impl, layer, 0)
    layer.step.high[0] = 17
    assert definition(layer) == {(0, 3)}
    check(impl, layer, 0)


@pytest.mark.parametrize(("impl", "device"), CASES)
def test_a_bonus_of_zero_reads_nothing(impl, device):
    layer = view(device)
    fill(layer, 0, [(0, 9, 9)] * 3)
    whole, scores = scores_for(layer, 0)
    before = whole.clone()
    layer = evolve(layer, held=torch.empty((0, 0), dtype=torch.int32))
    prefer_resident(layer, scores, counts_of(layer), 0.0, impl=impl)
    assert torch.equal(whole.view(torch.uint8), before.view(torch.uint8))


def test_what_does_not_fit_is_refused():
    layer = view("cpu")
    scores, counts = torch.zeros((6, 12)), torch.zeros(6, dtype=torch.int32)
    prefer_resident(layer, scores, counts, 1.0, impl="reference")
    for changes, reported in (
        ({"impl": "cuda"}, "impl must be"),
        ({"layer": evolve(layer, held=torch.empty((0, 0)))}, r"must be \[6, stored units\]"),
        ({"layer": evolve(layer, held=layer.held[:5])}, r"must be \[6, stored units\]"),
        ({"scores": scores[:, :11]}, r"scores \[6, 12 or more\]"),
        ({"scores": scores[:5]}, r"scores \[6, 12 or more\]"),
        ({"counts": counts[:5]}, r"counts \[6\]"),
        ({"scores": scores.double()}, "must be of"),
        ({"scores": torch.zeros((12, 6)).T}, "stride 1"),
    ):
        given = {"layer": layer, "scores": scores, "counts": counts, "impl": "reference"}
        with pytest.raises(ValueError, match=reported):
            prefer_resident(bonus=1.0, **{**given, **changes})


@pytest.mark.parametrize("bonus", [-0.5, True, "1", None, float("nan"), float("inf")])
def test_a_bonus_is_a_number(bonus):
    assert [params_of(STICKY, {"sticky": good}).sticky for good in (0, 0.5, 3)] == [0, 0.5, 3]
    with pytest.raises(ConfigError, match=f"sticky of largest_keys must .*got {bonus!r}"):
        params_of(STICKY, {"sticky": bonus})


@frozen
class StickyEnds(Ends):
    """Parameters: units at both ends, and the bonus."""

    sticky: float = field(default=0.0, validator=parameters.BONUS)


STICKY = evolve(ENTRY, parameters=StickyEnds)


def decode(on, steps=9, **options):
    """Decode random keys and queries; return the misses of each step but the first."""
    sizes = {"algorithm": ENTRY.name, "budget": 16, "buffer": 16, "ring_tokens": 8}
    sizes |= {"unit": 4, "max_request_tokens": 128, "max_tokens": 256, **options}
    single = evolve(STICKY, capabilities=evolve(STICKY.capabilities, units=(1, 1)))
    entry = single if "stages" in options else STICKY
    coordinator = make_coordinator(tier(on), registry=doubles(entry), **sizes)
    generator, slot, misses = torch.Generator().manual_seed(0), coordinator.request_begin(), []
    for tokens in (90, *[1] * steps):
        rows, chunks = ([], [(slot, tokens)]) if tokens > 1 else ([slot], [])
        coordinator.forward_begin(rows, chunks)
        for layer in range(LAYERS):
            q = 3 * torch.randn(tokens, HEADS, DIM, generator=generator)
            k, v = torch.randn(2, tokens, KV_HEADS, DIM, generator=generator)
            coordinator.attention(layer, q, k, v)
        coordinator.forward_end()
        misses.append(coordinator.transfers_of([slot]).misses)
        view = coordinator.layers[0].selector.view
        assert view.held.data_ptr() == coordinator.manager.stores[0].unit_slot[0].data_ptr()
        assert resident(view).shape == (len(rows) * KV_HEADS, view.group.max_units)
    check_integrity(coordinator)
    coordinator.close()
    return [after - before for before, after in pairwise(misses[1:])]


@pytest.mark.parametrize("on", ["cpu", "interpret"])
@pytest.mark.parametrize("sizes", [{}, {"stages": ["to_units"], "buffer": 48}])
def test_a_large_bonus_fetches_nothing_once_the_buffer_is_warm(on, sizes):
    """Units that the first step has loaded fill the budget of every later step."""
    plain, some, large = (
        decode(on, params={"sticky": bonus}, **sizes) for bonus in (0.0, 0.5, 1e6)
    )
    assert sum(plain) > sum(some) > sum(large) == 0, (plain, some, large)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("each", [1, 4])
def test_a_graph_replays_it(each):
    """A graph is captured once, and right for later maps, lengths and rows."""
    layer = view("cuda", each=each, units=700)
    whole, scores = scores_for(layer, 0)
    counts = counts_of(layer).contiguous()

    def step():
        prefer_resident(layer, scores, counts, BONUS, impl="triton")

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(4):
        lengths = [700 * 4 - 9 * seed, 33 + seed, 1500]
        rows = [(slot, n, n + 3) for slot, n in zip((1, -1, 0), lengths, strict=True)]
        fill(layer, seed, rows if seed % 2 else rows[::-1])
        counts.copy_(counts_of(layer))
        new, _ = scores_for(layer, seed)
        whole.copy_(new)
        expected = new.cpu()
        for lane, unit in definition(layer):
            expected[lane, unit] += BONUS
        graph.replay()
        torch.testing.assert_close(whole.cpu(), expected, rtol=0, atol=0, equal_nan=True)
