"""Memory of a coordinator on both tiers; none is left where it cannot be made."""

from __future__ import annotations

import pytest
import torch
from triton.runtime.jit import JITFunction

from topkv.decode.lanes import LaneBuffers
from topkv.errors import DeviceMemoryError
from topkv.kv.held import tensor_bytes
from topkv.kv.host_memory import HostMemory
from topkv.kv.step import StepUploader
from topkv.kv.store import GroupStore
from topkv.prompts.prefill import Prefill
from topkv.transfer.geometry import ZeroCopyTransfer
from topkv_testing.doubles import Gather, Scripted
from topkv_testing.machines.lifecycle_model import make_coordinator
from topkv_testing.tiers import tier

CPU = tier("cpu")

PLACES = [Scripted, Gather, GroupStore, StepUploader, LaneBuffers, ZeroCopyTransfer, Prefill]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        KeyboardInterrupt(),
    ],
    ids=["gpu", "cpu", "interrupt"],
)
def test_nothing_is_left_where_memory_runs_out(monkeypatch, place, error):
    made, ended = [], []
    begin, close = HostMemory.__init__, HostMemory.close

    def note(self, size, device, file=None):
        begin(self, size, device, file)
        if device.type != "meta":
            made.append(self)

    def fail(self, *args, **kwargs):
        raise error

    monkeypatch.setattr(HostMemory, "__init__", note)
    monkeypatch.setattr(HostMemory, "close", lambda self: (ended.append(self), close(self)))
    monkeypatch.setattr(place, "__init__", fail)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else DeviceMemoryError
    with pytest.raises(expected):
        make_coordinator(CPU)
    assert set(made) <= set(ended), "a pool was left registered"


def test_limits_hold_for_all_that_is_on_the_device():
    coordinator = make_coordinator(CPU)
    memory = coordinator.memory()
    coordinator.close()
    assert memory.workspace > 0
    assert memory.device == sum(
        (memory.buffer, memory.resident, memory.representation, memory.metadata, memory.workspace)
    )
    make_coordinator(CPU, device_memory=memory.device).close()
    with pytest.raises(DeviceMemoryError, match=f"need {memory.device} bytes"):
        make_coordinator(CPU, device_memory=memory.device - 1)


def test_more_requests_take_more_scratch():
    """Last queries and selections of a step grow with the requests."""
    few, many = (make_coordinator(CPU, max_requests=count) for count in (2, 4))
    assert 2 * few.memory().workspace == many.memory().workspace
    for coordinator in (few, many):
        coordinator.close()


OF_THIS_MODULE = torch.zeros(1000)


def kernel():
    """A kernel that has none of the memory that is counted."""


def test_a_kernel_does_not_lead_to_what_its_module_holds():
    """A kernel of Triton, compiled for a GPU, has the names of its module in an attribute."""
    jitted = JITFunction(kernel)
    assert jitted.__globals__["OF_THIS_MODULE"] is OF_THIS_MODULE
    assert tensor_bytes([jitted, torch.zeros(2)]) == 8


def test_the_device_is_done_before_the_host_pool_is_unregistered(monkeypatch):
    """A fetch of history that still runs would read addresses that are gone."""
    coordinator, calls = make_coordinator(CPU), []
    monkeypatch.setattr(coordinator.manager, "synchronize", lambda: calls.append("wait"))
    monkeypatch.setattr(coordinator.manager.host, "close", lambda: calls.append("unregister"))
    coordinator.close()
    assert calls == ["wait", "unregister"]
