"""Requests whose host entries are coded: a unit has one value, wherever it is or was."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from tests.machines.engine_pages import run_engine_pages
from tests.machines.scenarios import (
    SCENARIOS,
    a_long_request_rolls_back_and_goes_on,
    run_scenario,
    twins_share_pages_and_part,
)
from topkv_fp8_host_format.rows import rounded
from topkv_testing.machines.lifecycle_model import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    MODEL,
    SPARSE,
    make_coordinator,
)

pytestmark = pytest.mark.nightly

CODED = {"host_format": "fp8"}
KERNELS_SEE = (a_long_request_rolls_back_and_goes_on, twins_share_pages_and_part)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(scenario, on):
    if on.name == "interpret" and scenario not in KERNELS_SEE:
        pytest.skip("slow there, and the lifecycle draws coded entries on every tier")
    run_scenario(scenario, on, fast=False, unit=2, buffer=12, **CODED)


def test_results_are_those_of_pages_of_the_core(on):
    if on.name == "interpret":
        pytest.skip("slow there, and pages of engines are no business of kernels")
    run_engine_pages(on, **CODED)


def few(on, dtype, kept):
    """Skip all dtypes but one where kernels are interpreted."""
    if on.name == "interpret" and dtype is not kept:
        pytest.skip("slow there, and the suite of transfers has kernels for each dtype")


class Driver:
    """Drives one coordinator with tokens, queries and selections that are equal for all."""

    def __init__(self, on, dtype, **options):
        model = evolve(MODEL, dtype=dtype)
        self.on, self.dtype = on, dtype
        self.coordinator = make_coordinator(on, model=model, **CODED, **options)
        self.random = torch.Generator().manual_seed(3)
        self.outputs = []

    def rows(self, *shape):
        return torch.randn(shape, generator=self.random).to(self.on.device, self.dtype)

    def forward(self, decode=(), chunks=(), drop=False):
        coordinator, count = self.coordinator, len(decode) + sum(n for _, n in chunks)
        coordinator.forward_begin(decode, chunks)
        outs = []
        for layer in range(LAYERS):
            if layer in SPARSE:
                group = coordinator.layers[layer].view.group
                shape = (len(decode) * group.lane_heads, group.select)
                longest = max((coordinator.length(s) for s in decode if s >= 0), default=0)
                ids = torch.randint(-1, longest // group.unit + 1, shape, generator=self.random)
                chosen = coordinator.layers[layer].algorithm.next_ids
                chosen[layer] = ids.int().to(self.on.device)
            q = self.rows(count, HEADS, DIM)
            k, v = self.rows(count, KV_HEADS, DIM), self.rows(count, KV_HEADS, DIM)
            outs.append(coordinator.attention(layer, q, k, v).cpu())
        for layer in SPARSE:
            coordinator.layers[layer].algorithm.next_ids.clear()
        if drop:
            coordinator.forward_abort()
        else:
            coordinator.forward_end()
        self.outputs += outs

    def live(self):
        """Run all calls that move units between the tiers."""
        coordinator = self.coordinator
        slot = coordinator.request_begin()
        self.forward(chunks=[(slot, 9)])
        for _ in range(10):
            self.forward([slot])
        coordinator.rollback(slot, 18)
        self.forward([slot])
        self.forward([slot], drop=True)
        self.forward(chunks=[(slot, 6)])
        for _ in range(5):
            self.forward([slot, -1])
        coordinator.truncate(slot, 23)
        twin = coordinator.fork(slot)
        for _ in range(6):
            self.forward([twin, slot])
        return coordinator.transfers_of([slot, twin])


@DTYPES
def test_outputs_do_not_depend_on_what_was_evicted(dtype, on):
    """Equal with buffers that hold every unit, and with buffers that hold a selection of three."""
    few(on, dtype, torch.bfloat16)
    evicting = Driver(on, dtype, buffer=6, resident_fast_path=False)
    others = [Driver(on, dtype, buffer=64, resident_fast_path=fast) for fast in (False, True)]
    try:
        report = evicting.live()
        entry = evicting.coordinator.layers[0].view.group.host_entry_bytes
        assert report.misses > 50
        assert report.loaded_bytes == report.misses * entry
        keeping, resident = (other.live() for other in others)
        assert report.misses > keeping.misses > resident.misses == 0
        for other in others:
            for one, two in zip(evicting.outputs, other.outputs, strict=True):
                assert torch.equal(one, two)
    finally:
        for driver in (evicting, *others):
            driver.coordinator.close()


@DTYPES
def test_tokens_are_stored_alike_in_chunks_of_any_size(dtype, on):
    """A prompt at once, in pieces, token by token, and decoded: equal bytes are stored."""
    few(on, dtype, torch.float16)
    tokens = torch.randn(LAYERS, 2, 17, KV_HEADS, DIM, generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(dtype)
    for sizes in ((17,), (5, 12), (8, 1, 8), (1,) * 17, (4, *[0] * 13)):
        driver = Driver(on, dtype, buffer=6, resident_fast_path=False)
        coordinator, at = driver.coordinator, 0
        slot = coordinator.request_begin()
        for size in sizes:
            call = {"prefill": [(slot, size)]} if size else {"decode": [slot]}
            coordinator.forward_begin(**call)
            for layer in range(LAYERS):
                k, v = tokens[layer, :, at : at + (size or 1)].to(on.device)
                coordinator.attention(layer, driver.rows(size or 1, HEADS, DIM), k, v)
            coordinator.forward_end()
            at += size or 1
        coordinator.flush(slot)
        coordinator.manager.synchronize()  # the host is read here, by no kernel
        for layer in SPARSE:
            view = coordinator.layers[layer].view
            store = coordinator.manager.stores[0]
            host = store.host
            found = store.entries[coordinator.requests.pages.of(slot), view.index].cpu()
            stored = host.decode(host.parts(found))  # [pages, lanes, units, h, planes, unit, D]
            stored = stored.permute(4, 0, 2, 5, 1, 3, 6).flatten(4, 5).flatten(1, 3)[:, :17]
            assert torch.equal(stored, rounded(tokens[layer])), sizes
        coordinator.close()


def test_algorithms_are_given_rounded_keys_and_values(on):
    driver = Driver(on, torch.float32)
    coordinator, given = driver.coordinator, []
    algorithm = coordinator.layers[0].algorithm
    for name, first in (("construct", 3), ("update", 1)):  # where k stands
        call = getattr(algorithm, name)

        def spy(*args, call=call, first=first):
            given.append([x.clone() for x in args[first : first + 2]])
            call(*args)

        setattr(algorithm, name, spy)
    slot = coordinator.request_begin()
    driver.forward(chunks=[(slot, 5)])
    driver.forward([slot])
    coordinator.close()
    assert [len(k) for k, _ in given] == [5, 5, 1, 1]  # of two layers
    for rows in (x for both in given for x in both):
        assert torch.equal(rows, rounded(rows))
        assert rows.unique().numel() > 1
