"""Host memory: mapped, touched by many threads, registered with CUDA and unregistered."""

from __future__ import annotations

import logging
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

MOST_THREADS = 16
"""Threads that touch a mapping at most."""

_CHUNK = 32 << 20
"""Bytes that a thread touches at a time, where huge pages are not larger."""

_LOGGED = 4 << 30
"""Bytes from which on touching and registering take long enough to be logged."""

_PORTABLE_AND_MAPPED = 0x01 | 0x02  # cudaHostRegisterPortable | cudaHostRegisterMapped

_SYS = Path("/sys")

_unclosed: list[HostMapping] = []
"""Registered mappings that nobody closed."""

logger = logging.getLogger(__name__)


class HostMapping(mmap.mmap):
    """Memory that is unregistered before it is unmapped: of this process alone, or of a file that
    other processes map too.

    CUDA would keep the address range of a pool that nobody closed, and refuse it to the next one.
    Unregistering waits for the device, which nothing may do while a graph is captured, and the
    collector comes at any time. So what it finds is kept mapped until ``unregister_unclosed``.

    What is to be registered takes three steps, each timed by ``topkv doctor`` and by
    ``benchmarks/attach.py``: ``advise``, ``touch``, ``register``.
    """

    address = 0
    shared = False

    @classmethod
    def of(cls, size: int, file: int | None = None) -> HostMapping:
        """Map ``size`` bytes, rounded up to the page size of the system; none is touched.

        Args:
            size: bytes.
            file: descriptor of a file to map, whose other mappings see the same bytes; an empty
                one is given the size. It may be closed afterwards.

        Raises:
            OSError, ValueError, OverflowError: the system or Python refuses the size, or the file
                has another one.
        """
        if file is None:
            # Shared memory, which is Python's default, gets no huge pages on most systems.
            return cls(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        found = os.fstat(file).st_size
        if found not in (0, size):
            raise ValueError(f"another process has given its file {found} bytes")
        os.ftruncate(file, size)
        mapping = cls(file, size, flags=mmap.MAP_SHARED)
        mapping.shared = True
        return mapping

    def advise(self, huge: bool = True) -> None:
        """Give the system advice about the memory, before it is touched.

        Huge pages are asked for, or with ``huge=False`` declined; a system without them refuses
        that, and it is no error. Child processes do not inherit the memory: after a fork, the
        first write to a private page moves it to another place, and the device would read on
        at the old one, or the system would copy all of it for the child.

        Raises:
            OSError: the system cannot keep the memory from children.
        """
        advice = getattr(mmap, "MADV_HUGEPAGE" if huge else "MADV_NOHUGEPAGE", None)
        if advice is not None:
            with suppress(OSError):
                self.madvise(advice)
        self.madvise(mmap.MADV_DONTFORK)

    def touch(self, cpus: set[int]) -> None:
        """Have the system provide all pages now, by as many threads as there are ``cpus``.

        Each page's first byte is written, zero before and after; where other processes may write,
        it is read. An exception, an interrupt too, ends the threads after the chunks that they
        are at.

        Args:
            cpus: cores to run on; a page is on the NUMA node of the core that touches it, while
                that has room, or where a policy of the process (``numactl``) says.

        Raises:
            OSError, RuntimeError: threads cannot be started, or not on these cores.
        """
        memory = torch.frombuffer(self, dtype=torch.uint8)
        size, done = memory.numel(), 0
        parts = chunks(memory.data_ptr(), size)

        def write(part: tuple[int, int]) -> int:
            os.sched_setaffinity(0, cpus)  # of this thread
            first, end = part
            # Few elements: torch starts no threads of its own, and lets go of the interpreter.
            bytes_ = memory[first : end : mmap.PAGESIZE]
            bytes_.max() if self.shared else bytes_.zero_()
            return end - first

        threads = ThreadPoolExecutor(threads_of(cpus), "topkv-touch")
        try:
            for count in threads.map(write, parts):
                tenth, done = 10 * done // size, done + count
                if size >= _LOGGED and 10 * done // size > tenth:
                    logger.info("%d %% of %.1f GiB touched", 100 * done // size, size / 2**30)
        finally:
            threads.shutdown(cancel_futures=True)

    def register(self) -> int:
        """Let the current device reach the memory. Returns the error code of CUDA, 0 for none.

        Memory that was not touched before is provided page by page, which takes several times as
        long.
        """
        memory = torch.frombuffer(self, dtype=torch.uint8)
        address, size, cudart = memory.data_ptr(), memory.numel(), torch.cuda.cudart()
        if size >= _LOGGED:
            logger.info("registering %.1f GiB with CUDA", size / 2**30)
        # Python raises an interrupt when the call is through, so the address is noted before it.
        self.address = address
        code = int(cudart.cudaHostRegister(address, size, _PORTABLE_AND_MAPPED))
        if code:
            self.address = 0
        return code

    def unregister(self) -> None:
        """Wait for the device and take the memory from it. Idempotent."""
        if self.address:
            torch.cuda.synchronize()
            cudart = torch.cuda.cudart()
            # As above: an interrupt must not have it unregistered twice.
            address, self.address = self.address, 0
            cudart.cudaHostUnregister(address)

    def discard(self) -> None:
        """Unregister, and give the pages back: a traceback may keep the mapping for long."""
        self.unregister()
        self.madvise(mmap.MADV_DONTNEED)

    def __del__(self) -> None:
        if self.address:
            _unclosed.append(self)


def unregister_unclosed() -> None:
    """Unregister the mappings that the collector found; then they are unmapped."""
    while _unclosed:
        _unclosed[-1].unregister()
        _unclosed.pop()


def cpus_near(device: torch.device) -> set[int]:
    """Cores of this process that are near a device: on the NUMA node of its PCI slot.

    All cores that this process may use, where the system does not say or none is near.
    """
    allowed = os.sched_getaffinity(0)
    if device.type != "cuda":
        return allowed
    about: Any = torch.cuda.get_device_properties(device)
    slot = f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"
    path = _SYS / "bus/pci/devices" / slot / "local_cpus"
    mask = int(path.read_text().replace(",", ""), 16) if path.exists() else 0
    return {cpu for cpu in allowed if mask >> cpu & 1} or allowed


def threads_of(cpus: set[int]) -> int:
    """Return the number of threads that touch a mapping on these cores."""
    return min(MOST_THREADS, len(cpus))


def huge_page_bytes() -> int | None:
    """Size of a transparent huge page, or None where the system has none."""
    path = _SYS / "kernel/mm/transparent_hugepage/hpage_pmd_size"
    return int(path.read_text()) if path.exists() else None


def chunks(address: int, size: int) -> list[tuple[int, int]]:
    """Return begin and end of each chunk of a mapping, as offsets in bytes.

    Chunks end at addresses that are multiples of the size of huge pages: two threads in one huge
    page would both clear the whole of it.
    """
    chunk = max(_CHUNK, huge_page_bytes() or 0)
    return list(pairwise([0, *range(chunk - address % chunk, size, chunk), size]))
