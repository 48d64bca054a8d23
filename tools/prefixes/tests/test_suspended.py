"""Requests that are taken out of one coordinator and put into another one."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.machines.dropping import Lives
from tests.machines.engine_pages import SHAPE, run_forward
from topkv.errors import CapabilityError, HostMemoryError, RequestError
from topkv_prefixes import suspended
from topkv_testing.integrity import check_integrity
from topkv_testing.kit import examples
from topkv_testing.machines.lifecycle_model import DIM, HEADS, LAYERS, make_coordinator
from topkv_testing.tiers import tier


def life(random, coordinators, slots, chunks, steps):
    """Appends the same chunks and decode steps everywhere; outputs of each coordinator."""
    outs = [[] for _ in coordinators]
    for tokens in [*chunks, *[None] * steps]:
        count = tokens or 1
        new = torch.randn((count, *SHAPE), generator=random)
        q = torch.randn(LAYERS, count, HEADS, DIM, generator=random)
        for out, coordinator, slot in zip(outs, coordinators, slots, strict=True):
            rows = ([], [slot]) if tokens is None else ([slot], [])
            out.append(run_forward(coordinator, *rows, {slot: new}, q))
    return outs


@pytest.mark.slow
@pytest.mark.parametrize("host_format", ["model", "fp8"])
def test_a_request_goes_on_to_the_bit(on, monkeypatch, host_format):
    """Whatever stands beside it, in any slots and pages, block by block."""

    @settings(examples(on, cpu=25, interpret=4))
    @given(
        st.lists(st.integers(1, 13), max_size=2),
        st.integers(0, 6),
        st.integers(0, 2),
        st.sampled_from([1, 1 << 20]),
        st.integers(0, 99),
    )
    def check(chunks, steps, others, block, seed):
        random = torch.Generator().manual_seed(seed)
        monkeypatch.setattr(suspended, "BLOCK_BYTES", block)
        made = [make_coordinator(on, host_format=host_format) for _ in range(2)]
        try:
            first, second = made
            slot = first.request_begin()
            life(random, [first], [slot], chunks, steps if chunks else 0)
            for _ in range(others):
                life(random, [second], [second.request_begin()], [5], 1)
            state, blocks = suspended.suspend(first, slot)
            reported = suspended.Suspended(**json.loads(json.dumps(state.as_dict())))
            twin = suspended.resume(second, reported, blocks)
            assert twin == others
            assert second.length(twin) == first.length(slot)
            further = [3] if seed % 2 or not chunks else []
            outs = life(random, made, [slot, twin], further, 6)
            for one, other in zip(*outs, strict=True):
                assert torch.equal(one, other)
            check_integrity(second)
        finally:
            for coordinator in made:
                coordinator.close()

    check()


def test_what_does_not_fit_is_refused_and_leaves_nothing(make):
    first, second = make(), make()
    random = torch.Generator().manual_seed(0)
    slot = first.request_begin()
    life(random, [first], [slot], [9], 2)
    state, blocks = suspended.suspend(first, slot)
    blocks = list(blocks)
    broken = [
        (blocks[:1], "1 blocks are missing"),
        ([*blocks, blocks[-1]], "is unknown"),
        ([blocks[0], {}], "group0 is missing"),
        ([blocks[0], {**blocks[1], "group0": blocks[1]["group0"][:1]}], "group0 must be"),
        ([blocks[0], {**blocks[1], "group0": blocks[1]["group0"].half()}], "torch.float16"),
    ]
    for some, reason in broken:
        with pytest.raises(CapabilityError, match=reason):
            suspended.resume(second, state, some)
        assert second.manager.host.used == 0
        assert second.requests.free == second.config.max_requests
    with pytest.raises(CapabilityError, match="page_tokens: it was suspended with 4, this model"):
        suspended.resume(make(page_tokens=8), state, blocks)
    with pytest.raises(RequestError, match="slot 3 holds no request"):
        suspended.suspend(first, 3)
    for tokens in (47, 47, 6):
        life(random, [second], [second.request_begin()], [tokens], 0)
    assert second.manager.host.free == 2
    with pytest.raises(HostMemoryError):
        suspended.resume(second, state, blocks)
    check_integrity(second)


def test_a_suspended_request_knows_what_went():
    lives, others = Lives(tier("cpu")), Lives(tier("cpu"))
    slot = lives.begin()
    lives.forward({slot: 18}, decode=False)
    for _ in range(9):
        lives.forward({slot: 1}, decode=True)
    assert lives.dropped[slot] > 0
    state, blocks = suspended.suspend(lives.coordinator, slot)
    twin = suspended.resume(others.coordinator, suspended.Suspended(**state.as_dict()), blocks)
    others.left[twin], others.dropped[twin] = lives.left[slot], lives.dropped[slot]
    assert others.coordinator.requests.firm[twin] == lives.coordinator.requests.firm[slot] > 0
    for _ in range(9):
        others.forward({twin: 1}, decode=True)
    assert others.dropped[twin] > lives.dropped[slot]
    for each in (lives, others):
        each.close()
