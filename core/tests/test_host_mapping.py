"""Mappings are touched whole and in parallel, and an interrupt or a refusal leaves nothing."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import os
import re
import signal
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from topkv.errors import HostMemoryError
from topkv.kv import host_mapping
from topkv.kv.host_mapping import HostMapping, chunks, cpus_near, huge_page_bytes, threads_of
from topkv.kv.host_memory import HostMemory

PAGE = mmap.PAGESIZE
CHUNK = 4 * PAGE
CUDA = torch.device("cuda")


class Driver:
    """Stands in for CUDA's driver: registered addresses, and the code that it returns."""

    def __init__(self):
        self.registered, self.code, self.pages = set(), 0, None
        self.unregistered = []

    def cudaHostRegister(self, address, size, flags):
        assert address not in self.registered, "registered twice"
        self.pages = present(address, size)
        if self.code == 0:
            self.registered.add(address)
        return self.code

    def cudaHostUnregister(self, address):
        self.unregistered.append(address)
        self.registered.discard(address)


@pytest.fixture
def system(monkeypatch, tmp_path):
    """A system without huge pages, so that chunks of four pages are possible."""
    monkeypatch.setattr(host_mapping, "_SYS", tmp_path)
    monkeypatch.setattr(host_mapping, "_CHUNK", CHUNK)
    return tmp_path


@pytest.fixture
def driver(monkeypatch, system):
    driver = Driver()
    about = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    return driver


def address_of(mapping):
    return torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()


def present(address, size):
    """Ask the system for each page whether it is in memory; a list of 1 and 0."""
    pages = (ctypes.c_ubyte * -(-size // PAGE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0
    return [page & 1 for page in pages]


def flags_of(address):
    """Flags of the mapping at an address, as ``proc(5)`` names them."""
    smaps = Path("/proc/self/smaps").read_text().split(f"\n{address:x}-", 1)[1]
    return re.search(r"VmFlags: (.*)", smaps)[1].split()


def touching():
    """List threads that do not end. One that an interrupt cut off at its start ends by itself."""
    mine = [thread for thread in threading.enumerate() if thread.name.startswith("topkv-touch")]
    for thread in mine:
        thread.join(60)
    return [thread for thread in mine if thread.is_alive()]


@given(page=st.integers(0, 2000), size=st.integers(1, 40 * PAGE), huge=st.integers(0, 4))
def test_chunks_are_all_of_it_and_end_where_huge_pages_end(page, size, huge):
    chunk = max(CHUNK, PAGE << huge)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_mapping, "_CHUNK", CHUNK)
        patch.setattr(host_mapping, "huge_page_bytes", lambda: PAGE << huge if huge else None)
        parts = chunks(page * PAGE, size)
    assert parts[0][0] == 0
    assert parts[-1][1] == size
    for (_, end), (first, _) in pairwise(parts):
        assert end == first
        assert (page * PAGE + end) % chunk == 0
    assert all(0 < end - first <= chunk for first, end in parts)


NEAR = st.builds(
    lambda n, d: max(1, n + d), st.sampled_from([PAGE, CHUNK, 9 * CHUNK]), st.integers(-2, 2)
)


@pytest.mark.usefixtures("system")
def test_a_touched_mapping_is_there_zero_and_writable():
    @given(size=NEAR | st.integers(1, 9 * CHUNK), count=st.integers(1, 3))
    def check(size, count):
        mapping = HostMapping.of(size)
        address = address_of(mapping)
        assert not any(present(address, size))
        mapping.advise()
        mapping.touch(set(sorted(os.sched_getaffinity(0))[:count]))
        assert all(present(address, size))
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        assert len(memory) == size
        assert not memory.any()
        assert (memory.fill_(7) == 7).all()

    check()


def test_memory_that_is_not_registered_stays_untouched():
    memory = HostMemory(9 * PAGE, torch.device("cpu"))
    assert not any(present(memory.bytes.data_ptr(), memory.size))


def test_it_is_touched_before_it_is_registered(driver):
    memory = HostMemory(9 * CHUNK + 5, CUDA)
    assert driver.registered == {memory.bytes.data_ptr()}
    assert len(driver.pages) == 9 * 4 + 1
    assert all(driver.pages)
    memory.close()
    assert not driver.registered


@pytest.mark.parametrize("huge", [True, False])
def test_what_the_system_is_advised(huge):
    """Huge pages or none, and no copy for children: they would take pages from the device."""
    mapping = HostMapping.of(1 << 22)
    mapping.advise(huge)
    reported = flags_of(address_of(mapping))
    assert "dc" in reported
    assert "sh" not in reported, "shared memory gets no huge pages"
    if huge_page_bytes() is not None:
        assert ("hg" in reported, "nh" in reported) == (huge, not huge)


@pytest.mark.parametrize("absent", [True, False])
def test_huge_pages_need_not_be_there(monkeypatch, absent):
    if absent:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    else:
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345, raising=False)  # none of the kernel's
    mapping = HostMapping.of(PAGE)
    mapping.advise()
    assert "dc" in flags_of(address_of(mapping))


def test_threads_run_on_the_given_cores(monkeypatch, system):
    """No other thread changes its cores."""
    before, seen = os.sched_getaffinity(0), []
    place = os.sched_setaffinity

    def note(thread, cpus):
        place(thread, cpus)
        seen.append((threading.current_thread().name, os.sched_getaffinity(0)))

    monkeypatch.setattr(os, "sched_setaffinity", note)
    HostMapping.of(9 * CHUNK).touch({min(before)})
    assert len(seen) in (9, 10)  # the mapping may begin within a chunk
    assert {name.rpartition("_")[0] for name, _ in seen} == {"topkv-touch"}
    assert all(cpus == {min(before)} for _, cpus in seen)
    assert os.sched_getaffinity(0) == before
    assert not touching()


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("mask", "near"),
    [
        ("00000000,0000000a\n", {1, 3}),
        ("00000001,00000002\n", {1, 32}),
        ("00000000,00000100\n", {0, 1, 2, 3, 32}),  # none of these may be used
        (None, {0, 1, 2, 3, 32}),
    ],
)
def test_cores_near_the_gpu_are_those_of_its_slot(monkeypatch, system, mask, near):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3, 32})
    if mask:
        slot = system / "bus/pci/devices/0000:1b:00.0"
        slot.mkdir(parents=True)
        (slot / "local_cpus").write_text(mask)
    assert cpus_near(CUDA) == near
    assert cpus_near(torch.device("cpu")) == {0, 1, 2, 3, 32}


def test_threads_are_as_many_as_cores_up_to_a_limit():
    assert [threads_of(set(range(count))) for count in (1, 2, 16, 17, 200)] == [1, 2, 16, 16, 16]


def test_a_refused_registration_leaves_nothing(monkeypatch, driver):
    driver.code, made, of = 801, [], HostMapping.of
    monkeypatch.setattr(HostMapping, "of", lambda *how: made.append(of(*how)) or made[0])
    with pytest.raises(
        HostMemoryError, match="cudaHostRegister of 81920 bytes failed with code 801"
    ):
        HostMemory(20 * PAGE, CUDA)
    assert all(driver.pages)
    assert not driver.unregistered, "it was not registered"
    assert not any(present(address_of(made[0]), 20 * PAGE)), "the pages were not given back"
    driver.code = 0
    HostMemory(20 * PAGE, CUDA).close()


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (os, "sched_setaffinity", OSError(22, "Invalid argument")),
        (threading.Thread, "start", RuntimeError("can't start new thread")),
    ],
)
def test_what_stops_a_thread_reaches_the_caller(monkeypatch, driver, owner, name, error):
    def fail(*args):
        raise error

    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(HostMemoryError, match="touching the 163840 bytes") as raised:
        HostMemory(10 * CHUNK, CUDA)
    assert raised.value.__cause__ is error
    assert str(error) in str(raised.value)
    assert driver.pages is None
    assert not touching()


@pytest.mark.parametrize("when", ["waiting", "submitting"])
def test_control_c_ends_the_threads_within_their_chunk(monkeypatch, driver, when):
    """No thread takes another chunk after the interrupt, and nothing is registered."""
    reported, started, submitted = threading.Event(), [], []
    submit, shutdown = ThreadPoolExecutor.submit, ThreadPoolExecutor.shutdown

    def place(thread, cpus):
        started.append(thread)
        if when == "waiting" and len(started) == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        assert reported.wait(60), "nobody ended the threads"

    def send(self, *args):
        submitted.append(args)
        if when == "submitting" and len(submitted) == 50:
            raise KeyboardInterrupt
        return submit(self, *args)

    def end(self, wait=True, *, cancel_futures=False):
        shutdown(self, wait=False, cancel_futures=cancel_futures)
        reported.set()
        shutdown(self, wait=wait)

    monkeypatch.setattr(os, "sched_setaffinity", place)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", send)
    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", end)
    with pytest.raises(KeyboardInterrupt):
        HostMemory(100 * CHUNK, CUDA)
    assert len(started) <= threads_of(os.sched_getaffinity(0))
    assert not touching()
    assert driver.pages is None


def interrupted(line):
    """Make and close a pool, interrupted before the given line that this module's code runs.

    Returns: True if the line was reached, and weak references to the mapping.
    """
    left, made = line, []
    files = {host_mapping.__file__, HostMemory.__init__.__code__.co_filename}

    def trace(frame, event, arg):
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if isinstance(frame.f_locals.get("memory"), HostMapping):
            made.append(weakref.ref(frame.f_locals["memory"]))
        if event == "line":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        memory = HostMemory(3 * CHUNK, CUDA)
        sys.settrace(before)
        memory.close()
    except KeyboardInterrupt:
        return True, made
    finally:
        sys.settrace(before)
    return False, made


def test_an_interrupt_at_any_line_leaves_nothing(driver):
    line, reached, mappings = 0, True, 0
    while reached:
        reached, made = interrupted(line)
        if any(mapping() for mapping in made):
            gc.collect()  # slow
        assert not driver.registered, f"line {line}"
        assert not touching(), f"line {line}"
        assert not any(mapping() for mapping in made), f"line {line}"
        line, mappings = line + 1, mappings + bool(made)
    assert line > 30
    assert mappings > 20


def test_an_interrupt_of_the_registration_is_known_of(monkeypatch, driver):
    """Python raises the interrupt when the call has returned: then the memory is registered."""

    def register(address, size, flags):
        Driver.cudaHostRegister(driver, address, size, flags)
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "cudaHostRegister", register)
    with pytest.raises(KeyboardInterrupt):
        HostMemory(3 * CHUNK, CUDA)
    assert driver.pages
    assert not driver.registered


@pytest.mark.usefixtures("driver")
def test_large_pools_report_how_far_they_are(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "topkv")
    HostMemory(40 * CHUNK, CUDA).close()
    assert not caplog.messages
    monkeypatch.setattr(host_mapping, "_LOGGED", 40 * CHUNK)
    HostMemory(40 * CHUNK, CUDA).close()
    *touched, registering = caplog.messages
    assert [int(message.split()[0]) for message in touched] == sorted(
        {int(message.split()[0]) for message in touched}
    )
    assert len(touched) == 10
    assert touched[-1] == "100 % of 0.0 GiB touched"
    assert registering == "registering 0.0 GiB with CUDA"


@triton.jit
def _negate(words, index, seen):
    """Read a word of host memory from the device, and write it there with the other sign."""
    at = tl.program_id(0)
    place = words + tl.load(index + at)
    word = tl.load(place)
    tl.store(seen + at, word)
    tl.store(place, -word)


@pytest.mark.gpu
def test_the_device_reaches_every_chunk_of_a_large_pool():
    """Read and write words at both ends and on both sides of every border."""
    size = 1 << 30
    memory = HostMemory(size, CUDA)
    try:
        assert memory.registered
        parts = chunks(memory.bytes.data_ptr(), size)
        assert len(parts) >= 2
        places = [place for first, end in parts for place in (first, end - 8)]
        words = memory.bytes.view(torch.int64)
        index = torch.tensor(places) // 8
        words[index] = torch.arange(1, len(places) + 1)
        seen = torch.empty(len(places), dtype=torch.int64, device="cuda")
        _negate[(len(places),)](words, index.cuda(), seen)
        torch.cuda.synchronize()
        assert seen.tolist() == list(range(1, len(places) + 1))
        assert torch.equal(words[index], -seen.cpu())
    finally:
        memory.close()
