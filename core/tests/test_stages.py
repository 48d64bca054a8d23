"""Stages under the conformance kit, in a configuration, and behind algorithms of a coordinator."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from topkv.assembly.stages import Staged, Stages
from topkv.coordinator import SparseCoordinator
from topkv.entries import Capabilities, NoParameters
from topkv.errors import ConfigError
from topkv.hooks.algorithm import AlgorithmSpec, RepresentationSpec
from topkv.plugins.discovery import hookimpl
from topkv_testing.integrity import check_integrity
from topkv_testing.machines.lifecycle_model import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    SPARSE,
    doubles,
    make_coordinator,
)
from topkv_testing.models.doubles import SCRIPTED, Scripted
from topkv_testing.models.indexed import INDEXED
from topkv_testing.models.stage_doubles import KEEP, RERANK, Keep, Offered, products
from topkv_testing.stages import AlgorithmOptions, StageTests
from topkv_testing.tiers import tier


class TestRerank(StageTests):
    """The stage with pools that tests of the core use, under a name of its own."""

    @pytest.fixture
    def plugin(self):
        return evolve(RERANK, name="rerank")

    @pytest.fixture
    def options(self):
        return AlgorithmOptions(oracle=products)


class TestKeep(StageTests):
    """The stage that changes nothing, under a name of its own."""

    @pytest.fixture
    def plugin(self):
        return evolve(
            KEEP, name="kept", capabilities=evolve(KEEP.capabilities, attention=("gqa",))
        )


class Newest(Offered):
    """Selects the newest tokens, with gaps."""

    def __init__(self, setup):
        super().__init__(setup.group)


TOKENS_ALONE = evolve(
    SCRIPTED,
    name="tokens",
    factories=f"{__name__}:Newest",
    parameters=NoParameters,
    capabilities=evolve(SCRIPTED.capabilities, units=(1, 1)),
)
UNIT, PROMPT, STEPS = 2, 21, 6


class Life:
    """One request of a coordinator, with everything that it was given.

    Attributes:
        keys: ``[L, n, Hkv, D]`` so far.
        outs: outputs of every decode step and layer.
    """

    def __init__(self, **options):
        self.coordinator = make_coordinator(tier("cpu"), **options)
        self.generator = torch.Generator().manual_seed(3)
        self.keys = torch.empty(LAYERS, 0, KV_HEADS, DIM)
        self.outs = []
        self.slot = self.coordinator.request_begin()
        self.offers = isinstance(self.scripted(0), Scripted)
        self.widths = {layer: self.path(layer).algorithm.group.select for layer in SPARSE}

    def path(self, layer):
        return self.coordinator.layers[layer]

    def scripted(self, layer):
        algorithm = self.path(layer).algorithm
        return getattr(algorithm, "algorithm", algorithm)

    def offer(self, layer, closed):
        """Offer distinct closed units in any order, with a gap; return them as lists."""
        width, lanes = self.widths[layer], self.path(layer).lanes.group.lane_heads
        ids = torch.full((lanes, width), -1, dtype=torch.int32)
        for lane in ids:
            units = torch.randperm(closed, generator=self.generator)[: width - 1].int()
            lane[1 : 1 + len(units)] = units
        self.scripted(layer).next_ids[layer] = ids
        return ids.tolist()

    def forward(self, count, decode=False):
        """Run ``count`` tokens; return, of a decode step, units offered and left, by layer."""
        c, seen = self.coordinator, {}
        rows = [torch.randn(LAYERS, count, n, DIM, generator=self.generator)
                for n in (HEADS, KV_HEADS, KV_HEADS)]  # fmt: skip
        self.keys = torch.cat([self.keys, rows[1]], 1)
        closed = (self.keys.shape[1] - 1) // UNIT
        offered = {layer: self.offer(layer, closed) for layer in SPARSE if decode and self.offers}
        c.forward_begin(
            **({"decode": [self.slot]} if decode else {"prefill": [(self.slot, count)]})
        )
        for layer in range(LAYERS):
            out = c.attention(layer, *(each[layer] for each in rows))
            if decode:
                self.outs.append(out)
            if layer in offered:
                seen[layer] = (
                    rows[0][layer],
                    offered[layer],
                    self.path(layer).lanes.selection.ids.tolist(),
                )
        c.forward_end()
        for layer in SPARSE:
            if self.offers:
                self.scripted(layer).next_ids.clear()  # the next forward_begin may warm
        return seen

    def best(self, layer, q, among, lane):
        """K candidates of the largest products, in float64; in scope kv_head."""
        heads = q[0].double().unflatten(0, (KV_HEADS, -1))[lane]
        keys = self.keys[layer, :, lane].double()
        worth = {u: float((keys[u * UNIT : u * UNIT + UNIT] @ heads.T).max()) for u in among}
        select = self.path(layer).lanes.selection.ids.shape[1]
        return sorted(worth, key=lambda unit: (-worth[unit], unit))[:select]


def check_step(life):
    for layer, (q, offered, left) in life.forward(1, decode=True).items():
        for lane, (among, got) in enumerate(zip(offered, left, strict=True)):
            expected = life.best(layer, q, [unit for unit in among if unit >= 0], lane)
            assert [unit for unit in got if unit >= 0] == expected


def test_a_rerank_leaves_the_best_candidates_through_the_life_of_a_request():
    """The best stay, also after truncation, in a fork, and on pages that the fork shares."""
    life = Life(stages=[{"name": "rerank_exact", "params": {"widen": 2}}])
    assert life.widths == dict.fromkeys(SPARSE, 6)
    life.forward(PROMPT)
    for _ in range(STEPS):
        check_step(life)
    assert life.path(0).lanes.plans[0].slots.shape[1] == 3  # K' ends before the plan
    twin = life.coordinator.fork(life.slot)
    kept = life.keys
    for _ in range(2):
        check_step(life)
    life.slot, life.keys = twin, kept
    for _ in range(STEPS):
        check_step(life)
    life.coordinator.truncate(twin, 13)
    life.keys = life.keys[:, :13]
    for _ in range(STEPS):
        check_step(life)
    check_integrity(life.coordinator)
    life.coordinator.close()


def run(**options):
    """Run a life; return its outputs and counts."""
    life = Life(**options)
    life.forward(PROMPT)
    for _ in range(STEPS):
        life.forward(1, decode=True)
    counts = life.coordinator.transfers_of()
    life.coordinator.close()
    return torch.cat(life.outs), counts


@pytest.mark.parametrize("tokens", [False, True], ids=["units", "tokens"])
def test_a_neutral_stage_changes_no_bit(tokens):
    registry = doubles(TOKENS_ALONE)
    options = {"algorithm": "tokens", "buffer": 16} if tokens else {}
    last = ["to_units"] if tokens else []
    (one, counts), (two, again), (three, third) = (
        run(registry=registry, stages=[*stages, *last], **options)
        for stages in ((), ["keep"], ["keep", "keep"])
    )
    assert counts.hits + counts.misses > 20
    assert torch.equal(one, two)
    assert torch.equal(one, three)
    assert counts == again == third


def test_without_stages_there_is_the_algorithm_alone(make):
    assert type(make().layers[0].algorithm) is Scripted


def test_stages_of_some_layers_make_a_group_of_their_own(make):
    coordinator = make(
        stages=["keep"], layers={"1": "resident", "2": "streamed", "3": {"stages": []}}
    )
    assert [type(coordinator.layers[layer].algorithm) for layer in SPARSE] == [Staged, Scripted]


def test_widths_multiply_from_the_last_stage_and_end_at_the_units_of_a_request(make):
    rerank = {"name": "rerank_exact", "params": {"widen": 2}}
    links = make(stages=[rerank, "keep", rerank]).layers[0].algorithm.links
    assert [link.candidates.ids.shape[1] for link in links] == [12, 6, 6]
    assert [link.group.select for link in links] == [6, 6, 3]
    wide = make(stages=[{"name": "rerank_exact", "params": {"widen": 1000}}])
    assert wide.layers[0].algorithm.group.select == 48 // UNIT


def test_what_stages_hold_is_counted(make):
    bare, staged = make(), make(stages=["rerank_exact"])
    pool = staged.manager.representations[0].pools["stages[0].keys"]
    before, now = bare.memory(), staged.memory()
    assert now.representation == before.representation + pool.nbytes
    held = staged.layers[0].algorithm.links[0].candidates.ids.nbytes
    assert now.workspace == before.workspace + held
    counted = SparseCoordinator.required_bytes(staged.config, doubles())
    assert (counted.representation, counted.workspace) == (now.representation, now.workspace)


def test_buffers_are_warmed_by_what_stages_leave(monkeypatch):
    asked, refine = [], Keep.refine
    life = Life(stages=["keep"])
    stage = life.path(0).algorithm.links[0].stage  # that of the group

    def noted(layer, *call):
        asked.append(layer.layer)
        return refine(stage, layer, *call)

    monkeypatch.setattr(stage, "refine", noted)
    life.forward(PROMPT)
    assert asked == []
    life.coordinator.settle([life.slot])
    assert asked == list(SPARSE)
    life.coordinator.close()


def refused(make, **options):
    with pytest.raises(ConfigError) as error:
        make(**options)
    return "\n".join(error.value.reasons)


def test_refusals_name_every_reason(make):
    reported = refused(
        make,
        scope="shared",
        registry=doubles(
            evolve(KEEP, name="lanes", capabilities=Capabilities(scopes=("kv_head",)))
        ),
        stages=["lanes", "absent", {"name": "rerank_exact", "params": {"wide": 2}}],
    )
    for part in ("takes scope kv_head, got shared", "absent", "unknown parameter 'wide'", "widen"):
        assert part in reported, reported


@pytest.mark.parametrize(
    ("stages", "part"),
    [
        ("keep", "stages must be a list of names"),
        ([3], "stages[0] must be a name or a mapping with name, got 3"),
        ([{"params": {}}], "stages[0] must be a name or a mapping with name"),
        (["keep", {"name": "keep", "widen": 2}], "stages[1] unknown key 'widen'"),
        ([{"name": "keep", "params": 2}], "stages[0] params must map names"),
        ([""], "stages[0] name must be the name of a plugin"),
    ],
)
def test_wrong_settings_are_refused(make, stages, part):
    assert part in refused(make, stages=stages)


class Prompting(Scripted):
    """Selects for prompts."""

    @hookimpl
    def retrieve_prompt(self, layer, slot, start, q, weights, ids):
        ids.fill_(-1)


def test_algorithms_that_no_stage_stands_behind_are_refused_by_name(make):
    entry = evolve(SCRIPTED, name="prompting", factories=f"{__name__}:Prompting")
    registry = doubles(entry, INDEXED)
    reported = refused(make, registry=registry, algorithm="prompting", stages=["keep"])
    assert "retrieve_prompt" in reported
    assert "leave stages out" in reported
    reported = refused(make, registry=registry, algorithm=INDEXED.name, unit=1, stages=["keep"])
    assert "uses the model's own indexer; leave stages out (layers 0,3)" in reported


def test_a_pool_with_the_name_of_a_stages_pool_is_refused():
    class Named(Offered):
        @hookimpl
        def spec(self):
            pool = RepresentationSpec("stages[0].keys", "unit", (1,), torch.float32)
            return AlgorithmSpec((pool,))

    stages = Stages(make_coordinator(tier("cpu")).manager.groups[0], torch.device("cpu"))
    stages.put_first(Keep(None), 0)
    with pytest.raises(ConfigError, match="rename it"):
        stages.behind(Named(stages.group))
