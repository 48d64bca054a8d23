"""Forwards that an exception cut short: dropped, they leave no wrong state behind."""

from __future__ import annotations

import pytest
import torch

from topkv.decode.lanes import LaneBuffers
from topkv.errors import DeviceMemoryError, RequestError
from topkv.memory.manager import SparseKVCacheManager
from topkv_testing.integrity import check_integrity
from topkv_testing.machines.lifecycle_model import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
)

PROMPT = 17


def choose(coordinator, units):
    """Let each sparse layer select these units in each lane."""
    for path in coordinator.layers:
        if path.algorithm:
            ids = torch.tensor([units] * KV_HEADS, dtype=torch.int32)
            path.algorithm.next_ids[path.view.layer] = ids


def attend(coordinator, rows, seed, layers=range(LAYERS)):
    generator, outputs = torch.Generator().manual_seed(seed), []
    for layer in layers:
        q, k, v = (
            torch.randn(rows, heads, DIM, generator=generator)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        outputs.append(coordinator.attention(layer, q, k, v))
    return torch.stack(outputs)


def prompt(coordinator):
    slot = coordinator.request_begin()
    coordinator.forward_begin(prefill=[(slot, PROMPT)])
    attend(coordinator, PROMPT, 0)
    coordinator.forward_end()
    return slot


def step(coordinator, slot, seed):
    coordinator.forward_begin(decode=[slot])
    output = attend(coordinator, 1, seed)
    coordinator.forward_end()
    return output


@pytest.mark.parametrize("fast", [True, False], ids=["resident", "by order"])
@pytest.mark.parametrize("call", ["plan", "load", "append", "offload"])
@pytest.mark.parametrize("when", [0, 1], ids=["first layer", "last layer"])
@pytest.mark.parametrize("warm", [True, False], ids=["while warming", "in a step"])
def test_units_that_were_planned_and_not_loaded_are_loaded_later(
    make, monkeypatch, fast, call, when, warm
):
    """Maps have these units in the buffer, whatever was cut short behind the plan."""
    cut, whole = (make(resident_fast_path=fast, buffer=16) for _ in range(2))
    slots = [prompt(each) for each in (cut, whole)]
    if not warm:
        choose(cut, [4, 2, 0])
        choose(whole, [4, 2, 0])
        assert torch.equal(step(cut, slots[0], 1), step(whole, slots[1], 1))
    for each in (cut, whole):
        choose(each, [1, 3, 5])
    transfer, calls = cut.transfers[0], []
    real = getattr(transfer, call)

    def fail(*arguments):
        calls.append(call)
        if len(calls) == when + 1:
            raise KeyboardInterrupt
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(transfer, call, fail)
        try:
            step(cut, slots[0], 2)
        except KeyboardInterrupt:
            cut.forward_abort()
        else:
            cut.rollback(slots[0], cut.length(slots[0]) - 1)
    assert torch.equal(step(cut, slots[0], 2), step(whole, slots[1], 2))
    check_integrity(cut)


def test_a_forward_whose_rows_were_refused_is_not_closed(make):
    coordinator = make()
    slot = prompt(coordinator)
    coordinator.forward_begin(decode=[slot])
    with pytest.raises(RequestError, match="expected q"):
        coordinator.attention(0, *torch.zeros(3, 2, HEADS, DIM))
    with pytest.raises(RequestError, match="has not run for layers 0-3 "):
        coordinator.forward_end()
    coordinator.forward_abort()
    assert coordinator.length(slot) == PROMPT


def test_a_forward_whose_last_layer_failed_is_not_closed(make, monkeypatch):
    coordinator = make()
    slot = prompt(coordinator)
    coordinator.forward_begin(decode=[slot])
    attend(coordinator, 1, 0, layers=[0, 1, 2])
    with monkeypatch.context() as patch:
        patch.setattr(coordinator.layers[3].backend, "attend", None)
        with pytest.raises(TypeError):
            attend(coordinator, 1, 0, layers=[3])
    with pytest.raises(RequestError, match="has not run for layers 3 "):
        coordinator.forward_end()
    coordinator.forward_abort()
    assert coordinator.length(slot) == PROMPT


def test_memory_that_runs_out_after_the_host_pool_gives_it_back(make, monkeypatch):
    closed, close = [], SparseKVCacheManager.close

    def fail(*arguments):
        raise torch.cuda.OutOfMemoryError("no more")

    def note(self):
        closed.append(self)
        close(self)

    monkeypatch.setattr(SparseKVCacheManager, "close", note)
    monkeypatch.setattr(LaneBuffers, "__init__", fail)
    with pytest.raises(DeviceMemoryError):
        make()
    assert closed


def test_numbers_are_fp32_whatever_torch_makes_by_default(make):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        coordinator = make()
    finally:
        torch.set_default_dtype(before)
    assert {lanes._lse.dtype for lanes in coordinator.lanes} == {torch.float32}
