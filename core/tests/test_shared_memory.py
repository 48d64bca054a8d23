"""One file as the host memory of several processes, each of which registers it for its device."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import pytest
import torch

from topkv.errors import HostMemoryError
from topkv.kv.host_mapping import HostMapping
from topkv.kv.host_memory import HostMemory

PAGE = mmap.PAGESIZE

CHILD = """
import os, sys
import torch
from topkv.kv.host_memory import HostMemory
file = os.open(sys.argv[1], os.O_RDWR)
memory = HostMemory(int(sys.argv[2]), torch.device(sys.argv[3]), file)
assert (memory.bytes == 7).all()
memory.bytes[1:].copy_(torch.full((memory.size - 1,), 9, dtype=torch.uint8, device=sys.argv[3]))
memory.close()
"""


@pytest.fixture
def file():
    """An empty file in memory."""
    file = os.memfd_create("topkv-test")
    yield file
    os.close(file)


def test_touching_a_file_changes_nothing_of_it(file):
    """A write through one mapping is seen through the other."""
    size = 9 * PAGE + 5
    one, other = (HostMapping.of(size, file) for _ in range(2))
    first, second = (torch.frombuffer(each, dtype=torch.uint8) for each in (one, other))
    first.fill_(7)
    other.advise()
    other.touch(os.sched_getaffinity(0))
    assert (second == 7).all()
    second[size // 2 :] = 9
    assert first[size // 2 - 1 : size // 2 + 1].tolist() == [7, 9]


def test_a_file_of_another_size_is_refused(file):
    HostMemory(3 * PAGE, torch.device("cpu"), file).close()
    with pytest.raises(HostMemoryError, match="another process has given its file 12288 bytes"):
        HostMemory(4 * PAGE, torch.device("cpu"), file)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_another_process_writes_what_this_one_reads(device, file):
    memory = HostMemory(9 * PAGE + 5, torch.device(device), file)
    assert memory.registered == (device == "cuda")
    memory.bytes.fill_(7)
    path = f"/proc/{os.getpid()}/fd/{file}"
    command = [sys.executable, "-c", CHILD, path, str(memory.size), device]
    subprocess.run(command, check=True, timeout=120)
    assert memory.bytes.to(device).tolist() == [7] + [9] * (memory.size - 1)
    memory.close()
