"""Selections for the next step: each step attends to what the one before it has selected."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.tests.history_driver import Driver, prompts
from topkv.carrying import Carrying
from topkv.errors import ConfigError
from topkv.lanes import LaneBuffers
from topkv.ops import carried
from topkv.selectors import Own
from topkv.streams import SideStream
from topkv_prefixes.places import fingerprint_of
from topkv_testing.machines.delays import delayed_copies
from topkv_testing.machines.dropping import OPTIONS as DROPPING
from topkv_testing.machines.lifecycle_model import KV_HEADS, SPARSE, doubles, make_coordinator
from topkv_testing.models.stage_doubles import COMPLETE
from topkv_testing.tiers import tier

WIDTH = 3
"""Units that a step attends to; the last one is the newest."""
NOTHING = [[-1] * (WIDTH - 1)] * KV_HEADS
TIERS = ["cpu", "interpret", pytest.param("gpu", marks=pytest.mark.gpu)]


def taken(kept, limit):
    """The definition: kept units, and the newest unit in any case."""
    return [*kept, -1 if limit - 1 in kept else limit - 1]


class Pair(Driver):
    """A coordinator that selects ahead, and a plain one that is given its expected selections."""

    def __init__(self, on, **options):
        super().__init__(
            make_coordinator(on, ahead=True, **options), make_coordinator(on, **options)
        )
        self.kept = {}

    def call(self, name, *args):
        fresh = self.coordinators[0].requests.fresh.copy()
        answer = super().call(name, *args)
        if name == "forward_begin" and not isinstance(answer, str):
            for slot in args[0]:  # warmed by a prompt's last query, for which nothing is chosen
                if slot >= 0 and fresh[slot]:
                    self.kept |= {(layer, slot): NOTHING for layer in SPARSE}
        if name == "fork":
            self.kept |= {(layer, answer): self.kept[layer, args[0]]
                          for layer in SPARSE if (layer, args[0]) in self.kept}  # fmt: skip
        return answer

    def select(self, rows):
        ahead, plain = self.coordinators
        slots = ahead.forward.rows.tolist()
        self.coming = {}
        for layer in SPARSE:
            shape = (rows, KV_HEADS, WIDTH - 1)
            ids = torch.randint(-1, 20, shape, generator=self.random).int()
            limits = ahead.layers[layer].lanes.limit.tolist() if rows else []
            expected = [
                [taken(kept, limit) for kept in self.kept[layer, slot]]
                if slot >= 0 else [[-1] * WIDTH] * KV_HEADS
                for slot, limit in zip(slots, limits, strict=True)
            ]  # fmt: skip
            known = torch.tensor(expected, dtype=torch.int32).view(rows * KV_HEADS, WIDTH)
            for each, chosen in ((ahead, ids.flatten(0, 1)), (plain, known)):
                each.layers[layer].algorithm.next_ids[layer] = chosen.to(each.config.device)
            self.coming[layer] = dict(zip(slots, ids.tolist(), strict=True))

    def forward(self, decode=(), chunks=(), layers=None, drop=False):
        layers = range(4) if layers is None else layers
        super().forward(decode, chunks, layers, drop)
        for layer in SPARSE if decode and not drop and len(layers) == 4 else ():
            self.kept |= {(layer, slot): ids for slot, ids in self.coming[layer].items()}


def lives(driver):
    """Run prompts and forks, rows that change places, and requests that are cut and go on."""
    prompts(driver)
    one, two = driver.slots
    for step in range(12):
        order = range(4) if step % 3 else [3, 1, 0, 2]
        driver.forward([[one, two], [two, one], [two], [-1, one]][step % 4], layers=order)
        if step == 5:
            driver.call("truncate", two, 14)
        if step == 8:
            driver.call("rollback", one, driver.coordinators[0].length(one) - 1)


def compared(on, **options):
    """Compare outputs of lives with those of a plain coordinator, see ``Pair``."""
    driver = Pair(on, **options)
    lives(driver)
    driver.compare()
    driver.close()


def on_tier(name):
    on = tier(name)
    if on.missing:
        pytest.skip(on.missing)
    return on


@pytest.mark.slow
@pytest.mark.parametrize("name", TIERS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"buffer": 6}, marks=pytest.mark.nightly),
        pytest.param({"stall_times": True}, marks=pytest.mark.nightly),
    ],
)
def test_a_step_attends_to_what_the_one_before_selected(name, options):
    compared(on_tier(name), **options)


def test_it_does_for_any_rows():
    any_rows(tier("cpu"))


def any_rows(on):
    """Run steps of any rows, some of them dropped, and forks between them; compare outputs."""

    @settings(max_examples=40, deadline=None)
    @given(st.data())
    def check(data):
        driver = Pair(on)
        driver.random.manual_seed(data.draw(st.integers(0, 2**16)))
        for tokens in (23, 9):
            driver.begin()
            driver.forward(chunks=[(driver.slots[-1], tokens)])
        for _ in range(data.draw(st.integers(1, 12))):
            rows = data.draw(st.permutations([*driver.slots, -1]))
            driver.forward(
                rows[: data.draw(st.integers(1, len(rows)))],
                drop=data.draw(st.sampled_from([False, "at once", "offloaded"])),
            )
            if data.draw(st.booleans()) and len(driver.slots) < 3:
                driver.slots.append(driver.call("fork", driver.slots[0]))
        driver.compare()
        driver.close()

    check()


def told(calls, name, call):
    """Wrap a call, so that it records its name."""
    return lambda *args: (calls.append(name), call(*args))


def test_it_selects_and_copies_behind_the_attention_of_its_layer():
    coordinator, calls = make_coordinator(tier("cpu"), ahead=True), []
    slot = coordinator.request_begin()
    driver = Driver(coordinator)
    driver.slots.append(slot)
    driver.forward(chunks=[(slot, 21)])
    driver.forward([slot])
    path = coordinator.layers[SPARSE[0]]
    for owner, names in (
        (path.transfer, ("plan", "load")),
        (path.algorithm, ("update", "retrieve_topk")),
        (path.backend, ("attend",)),
    ):
        for name in names:
            call = getattr(owner, name)
            setattr(
                owner, name, lambda *args, name=name, call=call: (calls.append(name), call(*args))
            )
    driver.forward([slot], layers=[SPARSE[0]], drop=True)
    assert calls == ["update", "plan", "load", "attend", "retrieve_topk", "plan", "load"]
    driver.close()


def test_what_the_next_step_misses_is_there_when_it_begins():
    copied_before(tier("cpu"))


def copied_before(on):
    """Check that a step with a known selection misses at most the unit that has just closed."""
    driver = Driver(make_coordinator(on, ahead=True))
    driver.begin()
    driver.forward(chunks=[(driver.slots[0], 41)])
    for _ in range(6):
        driver.forward(driver.slots)
        (coordinator,) = driver.coordinators
        for layer in SPARSE:
            lanes = coordinator.layers[layer].lanes
            assert int(lanes.plans[0].misses.max()) <= 1
    assert coordinator.transfers_of().misses > 6
    driver.close()


@pytest.mark.parametrize("place", [[(Carrying, "warm"), (Own, "warm")], [(LaneBuffers, "begin")]])
def test_a_prompt_is_warmed_again_where_that_failed(monkeypatch, place):
    """The selection that a slot keeps is of an earlier request, until its prompt is warmed."""
    driver = Pair(tier("cpu"))
    driver.begin()
    driver.forward(chunks=[(driver.slots[0], 21)])
    driver.forward(driver.slots)
    driver.call("request_end", driver.slots.pop())
    driver.begin()
    driver.forward(chunks=[(driver.slots[0], 17)])
    with monkeypatch.context() as patch:
        for owner, name in place:
            patch.setattr(owner, name, interrupted)
        for each in driver.coordinators:
            with pytest.raises(KeyboardInterrupt):
                each.forward_begin(driver.slots)
    driver.kept |= {(layer, driver.slots[0]): NOTHING for layer in SPARSE}
    for _ in range(4):
        driver.forward(driver.slots)
    driver.compare()
    driver.close()


def interrupted(self):
    raise KeyboardInterrupt


def test_stored_pages_are_not_those_of_selections_in_time():
    found = []
    for options in ({}, {"ahead": True}, {"share": "FS", "layers": {"0-": "scripted"}}):
        options = {"layers": {"0-": "scripted"}} | options
        coordinator = make_coordinator(tier("cpu"), **options)
        found.append(fingerprint_of(coordinator.config, coordinator.manager))
        coordinator.close()
    assert len({*found}) == 3


def test_a_fork_and_an_image_of_a_request_take_the_selection_along():
    coordinator = make_coordinator(tier("cpu"), ahead=True)
    kept = coordinator.layers[SPARSE[0]].selector.kept()
    assert kept["coming"].shape == (coordinator.config.max_requests, KV_HEADS, WIDTH - 1)
    coordinator.close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"share": "FS"}, "ahead is for layers that select for themselves"),
        (DROPPING, "those behind are numbered anew"),
        (
            DROPPING | {"ahead": None, "layers": {"3": {"ahead": True, "stages": []}}},
            "those behind are numbered anew",
        ),
        ({"budget": 4}, "budget must be at least 6 .one selected, that unit and the tail., got 4"),
        (
            {"registry": doubles(COMPLETE), "stages": ["complete"]},
            "corrects for what was not attended, by the query of the step itself",
        ),
    ],
)
def test_what_cannot_be_selected_ahead_is_refused(options, reason):
    with pytest.raises(ConfigError, match=reason):
        make_coordinator(tier("cpu"), **{"ahead": True, **options})


@pytest.mark.parametrize("name", TIERS[1:])
def test_kernels_keep_and_take_what_the_reference_does(name):
    on = on_tier(name)

    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def check(data):
        width, lanes, requests, layers = (data.draw(st.integers(1, most)) for most in (9, 3, 4, 3))
        rows = data.draw(st.permutations([*range(requests), -1, -1]))[
            : data.draw(st.integers(1, 5))
        ]
        units = st.integers(-1, 9)

        def drawn(*shape):
            count = torch.Size(shape).numel()
            values = data.draw(st.lists(units, min_size=count, max_size=count))
            return torch.tensor(values, dtype=torch.int32).view(shape)

        slots = torch.tensor(rows, dtype=torch.int32)
        ids = drawn(layers, len(rows) * lanes, width)
        kept, limit = drawn(layers, requests * lanes, width), drawn(len(rows)).clamp(min=0)
        said = []
        for impl, device in (("reference", "cpu"), ("triton", on.device)):
            own = [x.clone().to(device) for x in (ids, slots, kept, limit)]
            taken_ids = torch.full((len(rows) * lanes, width + 1), -7, dtype=torch.int32)
            taken_ids = taken_ids.to(device)
            carried.take(own[2][-1], own[1], own[3], taken_ids, impl=impl)
            carried.keep(own[0], own[1], own[2], impl=impl)
            said.append((taken_ids.cpu(), own[2].cpu()))
        assert all(map(torch.equal, *said))
        named = [slot for slot in rows if slot >= 0]
        for row, slot in enumerate(rows):
            for lane in range(lanes):
                got = said[0][0][row * lanes + lane].tolist()
                before = kept[-1, slot * lanes + lane].tolist()
                end = int(limit[row])
                assert got == (taken(before, end) if slot >= 0 else [-1] * (width + 1))
                if slot >= 0:
                    after = said[0][1][:, slot * lanes + lane]
                    assert torch.equal(after, ids[:, row * lanes + lane])
        others = [slot for slot in range(requests) if slot not in named]
        by_slot = [each.unflatten(1, (requests, lanes))[:, others] for each in (said[0][1], kept)]
        assert torch.equal(*by_slot)

    check()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"impl": "cuda"}, "impl must be"),
        ({"ids": torch.zeros((1, 3, 2), dtype=torch.int32)}, "as many lanes for each request"),
        ({"ids": torch.zeros((1, 4, 3), dtype=torch.int32)}, "must be .1, 'lanes'. x 3"),
        ({"ids": torch.zeros((2, 4, 2), dtype=torch.int32)}, "must be .2, 'lanes'. x 2"),
        ({"slots": torch.zeros(2, dtype=torch.int64)}, "expected int32"),
    ],
)
def test_wrong_arguments_are_told(change, reason):
    given = {
        "ids": torch.zeros((1, 4, 2), dtype=torch.int32),
        "slots": torch.zeros(2, dtype=torch.int32),
        "kept": torch.zeros((1, 6, 2), dtype=torch.int32),
        "impl": "reference",
    }
    with pytest.raises(ValueError, match=reason):
        carried.keep(**{**given, **change})


@pytest.mark.gpu
def test_copies_may_be_late():
    compared(tier("gpu"))  # compiles
    with delayed_copies(0.01) as delays:
        compared(tier("gpu"))
    assert delays.count


@contextlib.contextmanager
def without_joining():
    """Let a step end while copies for the next one are on their way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SideStream, "join", lambda self, mark=None: None)
        yield


@pytest.mark.gpu
def test_a_missing_wait_shows():
    compared(tier("gpu"))  # compiles
    with without_joining(), delayed_copies(0.02), pytest.raises(AssertionError):
        compared(tier("gpu"))
