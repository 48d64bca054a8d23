"""Arguments that ``forward_begin``, ``attention`` and ``forward_end`` take and refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attrs import evolve

from topkv.errors import ConfigError, RequestError
from topkv_testing.integrity import check_integrity
from topkv_testing.machines.lifecycle_model import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    MODEL,
)


def attend(coordinator, rows, layers=range(LAYERS)):
    generator, outputs = torch.Generator().manual_seed(rows), []
    for layer in layers:
        q, k, v = (
            torch.randn(rows, heads, DIM, generator=generator)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        outputs.append(coordinator.attention(layer, q, k, v))
    return torch.stack(outputs)


def run(coordinator, decode=(), prefill=()):
    coordinator.forward_begin(decode=decode, prefill=prefill)
    attend(coordinator, len(decode) + sum(tokens for _, tokens in prefill))
    coordinator.forward_end()


def test_slots_may_be_reused_by_the_caller_at_once(make):
    coordinator = make()
    a, b = coordinator.request_begin(), coordinator.request_begin()
    run(coordinator, prefill=[(a, 5), (b, 5)])
    rows = np.array([a], dtype=np.int32)
    coordinator.forward_begin(decode=rows)
    rows[0] = b
    attend(coordinator, 1)
    coordinator.forward_end()
    assert (coordinator.length(a), coordinator.length(b)) == (6, 5)


@pytest.mark.parametrize("slot", [1, 4, 2**31 - 1])
def test_slots_that_hold_no_request_are_refused(make, slot):
    """Refused at once: slots are counted, and counts of 2**31 slots would take 16 GiB."""
    coordinator = make()
    known = coordinator.request_begin()
    coordinator.forward_begin(prefill=[(known, 3)])
    attend(coordinator, 3)
    coordinator.forward_end()
    for call in ({"decode": [known, slot]}, {"prefill": [(slot, 2)]}):
        with pytest.raises(RequestError, match=f"slot {slot} holds no request"):
            coordinator.forward_begin(**call)
    with pytest.raises(RequestError, match="named twice"):
        coordinator.forward_begin(decode=[known], prefill=[(known, 2)])
    run(coordinator, decode=[known])


@pytest.mark.parametrize(
    ("call", "reported"),
    [
        ({"queries": 4}, "rows of 4 queries are not among 1 to max_queries = 3"),
        ({"queries": 0}, "rows of 0 queries"),
        (
            {"queries": 2, "append": [3, 1]},
            r"0 to 2 tokens for each of 2 decode rows, got \[3, 1\]",
        ),
        ({"queries": 2, "append": [-1, 1]}, "append must have 0 to 2 tokens"),
        ({"queries": 2, "append": [1]}, "for each of 2 decode rows"),
    ],
)
def test_tokens_without_a_query_are_refused(make, call, reported):
    coordinator = make(max_queries=3, ring_tokens=6)
    slots = [coordinator.request_begin() for _ in range(2)]
    run(coordinator, prefill=[(slot, 3) for slot in slots])
    with pytest.raises(RequestError, match=reported):
        coordinator.forward_begin(decode=slots, **call)
    run(coordinator, decode=slots)


@pytest.mark.parametrize(("slots", "lengths"), [([0, 0], [2, 1]), ([0, 1], [2]), ([0], [2, 2])])
def test_a_rollback_that_names_no_length_for_each_slot_changes_nothing(make, slots, lengths):
    coordinator = make()
    both = [coordinator.request_begin() for _ in range(2)]
    run(coordinator, prefill=[(slot, 3) for slot in both])
    with pytest.raises(RequestError, match="each slot once and a length for each"):
        coordinator.rollback(slots, lengths)
    assert [coordinator.length(slot) for slot in both] == [3, 3]


@pytest.mark.parametrize("rows", [3, 7], ids=["fewer", "more"])
def test_rows_that_no_forward_announced_are_refused(make, rows):
    coordinator = make()
    slot = coordinator.request_begin()
    coordinator.forward_begin(prefill=[(slot, 6)])
    with pytest.raises(RequestError, match=rf"expected q \[6, 4, 4\].*got q \[{rows}, 4, 4\]"):
        attend(coordinator, rows)
    coordinator.forward_abort()
    assert coordinator.length(slot) == 0


def test_a_layer_that_was_left_out_is_named(make):
    coordinator = make()
    slot = coordinator.request_begin()
    coordinator.forward_begin(prefill=[(slot, 6)])
    attend(coordinator, 6, layers=[0, 1, 3])
    with pytest.raises(RequestError, match="layers 2 "):
        coordinator.forward_end()
    coordinator.forward_abort()
    assert coordinator.length(slot) == 0
    check_integrity(coordinator)


def test_a_chunk_that_takes_tokens_back_is_refused(make):
    coordinator = make()
    slot = coordinator.request_begin()
    run(coordinator, prefill=[(slot, 6)])
    with pytest.raises(RequestError, match=r"chunk \(0, -3\)"):
        coordinator.forward_begin(prefill=[(slot, -3)])
    assert coordinator.length(slot) == 6
    run(coordinator, decode=[slot])


@pytest.mark.parametrize("generated", [0, 3])
def test_no_more_tokens_follow_a_prompt_than_the_algorithm_has_room_for(make, generated):
    coordinator = make(params={"generated": generated})
    slot = coordinator.request_begin()
    run(coordinator, prefill=[(slot, 5)])
    for _ in range(generated):
        run(coordinator, decode=[slot])
        run(coordinator, prefill=[(slot, 0)])  # no tokens are no prompt
    with pytest.raises(RequestError, match=f"more than {generated} tokens after their prompt"):
        coordinator.forward_begin(decode=[slot])
    run(coordinator, prefill=[(slot, 1)])
    assert coordinator.length(slot) == 6 + generated


def test_each_group_is_settled_at_its_own_period(make):
    layers = {
        "1": "resident",
        "2": {"params": {"settle_period": 6}},
        "3": {"params": {"settle_period": 4}},
    }
    coordinator = make(layers=layers)
    slot = coordinator.request_begin()
    run(coordinator, prefill=[(slot, 5)])
    for _ in range(13):
        run(coordinator, decode=[slot])
    turns = [int(coordinator.layers[layer].view.pools["turns"][slot]) for layer in (0, 2, 3)]
    # At the prompt's end, and as often as a period was full when a forward began.
    assert turns == [1, 1 + 2, 1 + 3]
    run(coordinator, prefill=[(slot, 2)])
    run(coordinator, decode=[slot])
    turns = [int(coordinator.layers[layer].view.pools["turns"][slot]) for layer in (0, 2, 3)]
    assert turns == [2, 4, 5]


@pytest.mark.parametrize("call", ["copy_page", "lease", "flush", "copy_slot", "restore"])
def test_a_fork_that_is_cut_short_leaves_nothing(make, monkeypatch, call):
    coordinator = make()
    slot = coordinator.request_begin()
    run(coordinator, prefill=[(slot, 5)])
    run(coordinator, decode=[slot])
    free = coordinator.manager.host.free
    owner = {
        "copy_page": coordinator.manager,
        "lease": coordinator.manager.host,
        "flush": coordinator.transfers[0],
        "copy_slot": coordinator.manager.representations[-1],
        "restore": coordinator.transfers[-1],
    }[call]

    def cut(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, call, cut)
        with pytest.raises(KeyboardInterrupt):
            coordinator.fork(slot)
    check_integrity(coordinator)
    assert coordinator.manager.host.free == free
    assert coordinator.requests.free == 3
    run(coordinator, decode=[slot, coordinator.fork(slot)])


@pytest.mark.parametrize("call", ["reset_slot", "reset", "poison_pages"])
def test_an_end_that_is_cut_short_can_be_called_again(make, monkeypatch, call):
    coordinator = make()
    slot = coordinator.request_begin()
    run(coordinator, prefill=[(slot, 5)])
    owners = {
        "reset_slot": coordinator.manager.representations[0],
        "reset": coordinator.transfers[0],
        "poison_pages": coordinator.manager.stores[0],
    }

    def cut(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(owners[call]), call, cut)
        with pytest.raises(KeyboardInterrupt):
            coordinator.request_end(slot)
    coordinator.request_end(slot)
    check_integrity(coordinator)
    assert coordinator.manager.host.used == 0
    assert coordinator.requests.free == 4


def test_a_part_of_a_model_is_configured_and_called_by_the_numbers_of_the_whole(make):
    part = evolve(MODEL, first_layer=10, total_layers=20)
    layers = {"0-9": "resident", "11": "resident", "12": "streamed", "14-": "resident"}
    whole, part = make(), make(model=part, layers=layers)
    outputs = []
    for coordinator in (whole, part):
        coordinator.forward_begin(prefill=[(coordinator.request_begin(), 6)])
        outputs.append(attend(coordinator, 6, layers=coordinator.model.layers))
        coordinator.forward_end()
    assert torch.equal(*outputs)
    assert [path.view.layer for path in part.layers] == [10, 11, 12, 13]
    shapes = [group.shape for group in part.config.groups]
    assert [shape.layers for shape in shapes] == [(10, 13), (11,), (12,)]


@pytest.mark.parametrize(("first", "total"), [(-1, None), (17, 20), (1, 4)])
def test_a_part_that_is_not_in_the_model_is_refused(make, first, total):
    with pytest.raises(ConfigError, match=f"4 layers among the {total} .*got {first}"):
        make(model=evolve(MODEL, first_layer=first, total_layers=total))
