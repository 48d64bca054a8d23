"""Host ids, and behaviour of ``ScoredUnits`` that no plugin uses."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st

from topkv.entries import Capabilities, NoParameters, PluginEntry
from topkv.errors import ConfigError, PluginError
from topkv.hooks.algorithm import AlgorithmSetup, RepresentationSpec
from topkv.types import GroupShape, LayerView, StepTensors
from topkv_authoring.selectors import ScoredUnits, ends_of, host_ids
from topkv_testing.algorithm.bench import AlgorithmBench
from topkv_testing.algorithm.case import Case
from topkv_testing.algorithms import AlgorithmOptions, AlgorithmTests
from topkv_testing.differences import require_same
from topkv_testing.kit import subject_of
from topkv_testing.machines.lifecycle_model import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    MODEL,
    doubles,
    make_coordinator,
)
from topkv_testing.strategies import Geometry
from topkv_testing.tiers import tier

CPU = torch.device("cpu")
UNIT, PAGE, WIDTH, SELECT = 4, 12, 7, 5


class LargestKeys(ScoredUnits):
    """Keeps the largest keys of a unit, channel by channel."""

    def refusals(self):
        return ["scale is 3"] if self.model.scale == 3 else []

    def representations(self):
        shape = (self.group.num_kv_heads, self.group.head_dim)
        return [RepresentationSpec("largest", "unit", shape, torch.float32)]

    def represent(self, keys, valid):
        return {"largest": torch.where(valid[:, :, None, None], keys, -torch.inf).amax(1)}

    def score(self, q, kept):
        q = q.float().unflatten(1, (self.group.num_kv_heads, -1))
        return torch.einsum("bhgd,buhd->bhgu", q, kept["largest"]).flatten(1, 2)


class LargestKeysTriton(LargestKeys):
    """``LargestKeys`` with top-k by kernels."""

    impl = "triton"


@frozen
class Ends:
    """Parameters: units at both ends."""

    sink_units: int | None = 0
    recent_units: int | None = 0


ENTRY = PluginEntry(
    "largest_keys",
    "algorithm",
    {"reference": f"{__name__}:LargestKeys", "triton": f"{__name__}:LargestKeysTriton"},
    capabilities=Capabilities(units=(1, 128), tiers=("cpu", "interpret")),
    defaults={"scope": "kv_head"},
    parameters=Ends,
)


def group(**changes):
    shape = GroupShape(
        layers=(0,),
        unit=UNIT,
        lane_heads=KV_HEADS,
        heads_per_lane=1,
        head_dim=DIM,
        dtype=torch.float32,
        page_tokens=PAGE,
        max_requests=3,
        max_units=WIDTH * PAGE // UNIT,
        select=SELECT,
        buffer_slots=8,
        ring_slots=2,
    )
    return evolve(shape, **changes)


@given(data=st.data(), unit=st.sampled_from([1, 2, 4, 12]))
def test_a_host_id_is_the_page_and_the_place_on_it(data, unit):
    pages = data.draw(st.permutations(range(3 * WIDTH)))
    table = torch.tensor(pages, dtype=torch.int32).view(3, WIDTH)
    none = torch.zeros(0, dtype=torch.int32)
    step = StepTensors(
        slots=none, lengths=none, high=none, appended=none, resident=none, page_table=table
    )
    layer = LayerView(0, 0, group(unit=unit), step, ring_k=none, ring_v=none)
    each = st.tuples(st.integers(0, 2), st.integers(0, WIDTH * PAGE // unit - 1))
    asked = data.draw(st.lists(each, max_size=9))
    slots, units = torch.tensor(asked, dtype=torch.int64).view(-1, 2).unbind(1)
    found = host_ids(layer, slots, units)
    assert found.dtype is torch.int64
    expected = [
        pages[slot * WIDTH + unit * index // PAGE] * (PAGE // unit) + unit * index % PAGE // unit
        for slot, index in asked
    ]
    assert found.tolist() == expected
    assert torch.equal(host_ids(layer, slots[:, None].int(), units.int()).diagonal(), found)
    assert [int(host_ids(layer, *pair)) for pair in asked] == expected


@pytest.mark.parametrize(
    ("params", "reasons"),
    [
        ({"sink_units": SELECT + 1}, ["sink_units must be an integer of 0 to 5"]),
        ({"sink_units": -1, "recent_units": 6}, ["got -1", "recent_units must be"]),
        ({"sink_units": 3, "recent_units": 3}, ["recent_units must be an integer of 0 to 2"]),
    ],
)
def test_every_reason_is_reported_at_once(params, reasons):
    setup = AlgorithmSetup(evolve(MODEL, scale=3), group(), Ends(**params), CPU, None)
    with pytest.raises(ConfigError, match="LargestKeys") as refused:
        LargestKeys(setup)
    for reason, reported in zip(["scale is 3", *reasons], refused.value.reasons, strict=True):
        assert reason in reported
    fits = evolve(setup, model=MODEL, params=Ends(2, 3))
    assert LargestKeys(fits).work is None


class Transposed(LargestKeys):
    """Scores units for heads, and not heads for units."""

    def score(self, q, kept):
        return super().score(q, kept).mT


class Summed(LargestKeys):
    """Scores lanes, and not query heads."""

    def score(self, q, kept):
        return super().score(q, kept).unflatten(1, (KV_HEADS, -1)).sum(2)


class Merged(LargestKeys):
    """Sums scores over lanes, and so drops their axis."""

    def combine(self, scores):
        return super().combine(scores).sum(1)


class Flat(LargestKeys):
    """Keeps rows whose heads are flattened into one axis."""

    def represent(self, keys, valid):
        return {"largest": super().represent(keys, valid)["largest"].flatten(1)}


@pytest.mark.parametrize(
    ("broken", "reported"),
    [
        (Transposed, r"score must give \[3, 4, 12\] .rows, query heads, units., got \[3, 12, 4\]"),
        (Summed, r"score must give \[3, 4, 12\] .rows, query heads, units., got \[3, 2, 12\]"),
        (Merged, r"combine must give \[3, 2, 12\] .rows, lanes, units., got \[3, 12\]"),
        (Flat, r"represent must give \[4, 2, 4\] of 'largest', got \[4, 8\]"),
    ],
)
def test_a_wrong_shape_is_reported_with_the_class_and_both_shapes(broken, reported):
    entry = evolve(ENTRY, factories=f"{__name__}:{broken.__name__}")
    case = Case(Geometry(2, 2, 4, 4, 2, "kv_head", torch.float32), {}, 3, 2, "normal", 1, 12, 96.0)
    bench = AlgorithmBench(subject_of(entry, "algorithm", tier("cpu")), case)

    def life():
        bench.prefill(0, case.tokens(0)[:16])
        bench.retrieve(case.queries(3), [0, -1, -1])

    with pytest.raises(PluginError, match=reported) as error:
        life()
    assert f"{__name__}.{broken.__name__} does not keep the contract" in str(error.value)


class Sums(LargestKeys):
    """Keeps the sum of the keys of a unit."""

    def represent(self, keys, valid):
        return {"largest": torch.where(valid[:, :, None, None], keys, 0).sum(1)}


@pytest.mark.parametrize("unit", [8, 16])
def test_sums_of_decoded_units_have_the_bits_of_those_of_prompts(unit):
    entry = evolve(ENTRY, factories=f"{__name__}:Sums")
    geometry = Geometry(3, 1, 5, unit, 1, "kv_head", torch.float32)
    case = Case(geometry, {}, 3, 2, "normal", 1, 4, 96.0, exact=False)
    subject, stored = subject_of(entry, "algorithm", tier("cpu")), []
    for prompt in (case.most, unit):
        bench = AlgorithmBench(subject, case)
        bench.prefill(0, case.tokens(0)[:prompt])
        bench.extend(0, case.tokens(0)[prompt:])
        stored.append(bench.stored(0))
    require_same(*stored, "sums of decoded units")


def forced(length, bench):
    """The first closed units and the last ones."""
    closed = (length - 1) // bench.group.unit
    sinks, recent = (bench.case.params[name] for name in ("sink_units", "recent_units"))
    return set(range(min(sinks, closed))) | set(range(max(closed - recent, 0), closed))


FORCED = AlgorithmOptions(
    params=st.fixed_dictionaries(
        {"sink_units": st.integers(0, 1), "recent_units": st.integers(0, 2)}
    ),
    promised=forced,
    selects=(3, 5),
)


@pytest.mark.parametrize("name", ["cpu", "interpret"])
def test_first_and_recent_units_are_forced(name):
    subject = subject_of(ENTRY, "algorithm", tier(name), FORCED)
    AlgorithmTests().test_promised_units_are_selected(subject)


def selections(**options):
    """Tokens that an algorithm of single tokens selects in 9 steps, of each layer."""
    entry = evolve(ENTRY, capabilities=evolve(ENTRY.capabilities, units=(1, 1)))
    sizes = {"algorithm": ENTRY.name, "ring_tokens": 8, "max_request_tokens": 64}
    coordinator = make_coordinator(tier("cpu"), registry=doubles(entry), **sizes, **options)
    generator, slot, found = torch.Generator().manual_seed(0), coordinator.request_begin(), []
    algorithm = coordinator.layers[0].algorithm
    algorithm = getattr(algorithm, "algorithm", algorithm)  # before a stage
    select = algorithm.retrieve_topk

    def note(layer, q, weights, out):
        found.append(select(layer, q, weights, out).ids.clone())
        return out

    algorithm.retrieve_topk = note
    for tokens in (14, *[1] * 9):
        rows, chunks = ([], [(slot, tokens)]) if tokens > 1 else ([slot], [])
        coordinator.forward_begin(rows, chunks)
        for layer in range(LAYERS):
            q = torch.randn(tokens, HEADS, DIM, generator=generator)
            k, v = torch.randn(2, tokens, KV_HEADS, DIM, generator=generator)
            coordinator.attention(layer, q, k, v)
        coordinator.forward_end()
    coordinator.close()
    return found


def test_single_tokens_are_represented_without_a_ring():
    """An algorithm before a stage that regrains sees no ring: the new token is its unit."""
    plain = selections(unit=1, budget=1 + SELECT, buffer=2 * SELECT)
    sizes = {"budget": UNIT + SELECT, "buffer": UNIT * SELECT}
    regrained = selections(unit=UNIT, stages=["to_units"], **sizes)
    assert len(plain) == len(regrained) > 9
    for one, other in zip(plain, regrained, strict=True):
        assert torch.equal(one, other)
    assert max(int(ids.max()) for ids in plain) > 14, "no decoded token was selected"


@given(select=st.integers(1, 300))
def test_ends_keep_selections_nested(select):
    """A larger budget forces as much as a smaller one, and leaves as many units to be ranked."""
    ends = Ends(None, None)
    small, large = ends_of(ends, select), ends_of(ends, select + 1)
    assert all(a <= b for a, b in zip(small, large, strict=True))
    assert sum(large) - sum(small) <= 1
    assert sum(small) <= select / 3
    assert small == (4, 8) or select < 48


@given(select=st.integers(1, 300), given_units=st.integers(0, 300))
def test_ends_take_what_the_other_end_leaves(select, given_units):
    held = min(given_units, select)
    sinks, recent = ends_of(Ends(held, None), select)
    assert sinks == held
    assert recent == min(8, select // 6, select - held)
    sinks, recent = ends_of(Ends(None, held), select)
    assert recent == held
    assert sinks == min(4, (select + 3) // 12, select - held)


def test_ends_are_the_parameters_where_they_are_given():
    assert ends_of(NoParameters(), 64) == (0, 0)
    assert ends_of(Ends(1), 64) == (1, 0)
    assert ends_of(Ends(0, None), 64) == (0, 8)


@pytest.mark.parametrize(
    ("select", "ends"), [(5, (0, 0)), (12, (1, 2)), (48, (4, 8)), (205, (4, 8))]
)
def test_none_is_read_where_an_algorithm_is_made(select, ends):
    params = Ends(None, None)
    made = LargestKeys(AlgorithmSetup(MODEL, group(select=select), params, CPU, None))
    assert (made.sink_units, made.recent_units) == ends
