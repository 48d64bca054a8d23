"""Registered host memory ends with its owner, however the owner ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from topkv.kv import host_memory
from topkv.kv.host_memory import HostMemory

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

CHILD = """
import sys
import torch
from topkv.kv.host_memory import HostMemory
memory = HostMemory(1 << 24, torch.device(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("device", DEVICES)
def test_close_is_idempotent(device):
    memory = HostMemory(3 * 4096 + 5, torch.device(device))
    assert memory.bytes.numel() == 3 * 4096 + 5
    assert memory.registered == (device == "cuda")
    memory.bytes.fill_(7)
    for _ in range(2):
        memory.close()
        assert not memory.registered
    assert (memory.bytes == 7).all(), "the bytes stay readable until the last view is gone"
    again = HostMemory(4096, torch.device(device))
    again.close()


@pytest.mark.parametrize("device", DEVICES)
def test_memory_that_nobody_closed_can_be_had_again(device):
    """The system hands out freed addresses again; for CUDA they must be free too."""
    for _ in range(20):
        memory = HostMemory(1 << 16, torch.device(device))
        view = memory.bytes[5:]
        del memory
        view.fill_(3)
        del view


class Driver:
    """Stands in for CUDA's driver, and records its calls."""

    def __init__(self):
        self.calls = []

    def cudaHostRegister(self, address, size, flags):
        self.calls.append("register")
        return 0

    def cudaHostUnregister(self, address):
        self.calls.append("unregister")
        return 0

    def synchronize(self):
        self.calls.append("synchronize")


def test_the_collector_does_not_touch_the_device(monkeypatch):
    """The collector may run at any time: a wait would break the capture of a graph."""
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", driver.synchronize)
    allowed = os.sched_getaffinity(0)
    monkeypatch.setattr(host_memory, "cpus_near", lambda device: allowed)
    memory = HostMemory(4096, torch.device("cuda"))
    del memory
    assert driver.calls == ["register"]
    again = HostMemory(4096, torch.device("cuda"))
    assert driver.calls == ["register", "synchronize", "unregister", "register"]
    again.close()


@pytest.mark.gpu
def test_a_graph_is_captured_while_a_pool_is_collected():
    memory = HostMemory(1 << 16, torch.device("cuda"))
    x = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
        del memory
    graph.replay()
    assert (x == 1).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_killed_process_leaves_nothing(device, how):
    shared = Path("/dev/shm")
    before = set(os.listdir(shared)) if shared.exists() else set()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, device],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdout.readline() == "ready\n"
    mine = {name for name in set(os.listdir(shared)) - before if str(child.pid) in name}
    child.send_signal(how)
    # A child that outlives the signal ends well when its stdin does: no clock decides.
    child.communicate()
    assert child.returncode != 0
    assert not mine, f"the pool left {mine} in shared memory"
