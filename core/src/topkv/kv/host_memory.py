"""Host memory that a GPU can read and write in place: exact size, mapped and registered."""

from __future__ import annotations

import ctypes
import mmap
import platform

import torch
from torch import Tensor

from topkv.errors import HostMemoryError

_PORTABLE_AND_MAPPED = 0x01 | 0x02  # cudaHostRegisterPortable | cudaHostRegisterMapped


_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}
"""Number of the ``move_pages`` system call by machine."""

_unclosed: list[_Registration] = []
"""Mappings that nobody closed; the next one unregisters them."""


class _Registration(mmap.mmap):
    """Anonymous memory that is unregistered before it is unmapped.

    CUDA would keep the address range of a pool that nobody closed, and refuse it to the next one.
    Unregistering waits for the device, which nothing may do while a graph is captured, and the
    collector comes at any time. So what it finds is kept mapped until the next registration.
    """

    address = 0

    def register(self, address: int, size: int) -> int:
        """Returns the error code of CUDA, 0 for none."""
        while _unclosed:
            _unclosed[-1].unregister()
            _unclosed.pop()
        # Touching first lets the kernel fault pages in large runs; registering untouched
        # memory does the same page by page and is several times slower.
        ctypes.memset(address, 0, size)
        code = int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE_AND_MAPPED))
        self.address = 0 if code else address
        return code

    def unregister(self) -> None:
        """Idempotent."""
        if self.address:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self.address)
            self.address = 0

    def __del__(self) -> None:
        if self.address:
            _unclosed.append(self)


class HostMemory:
    """A byte tensor in host memory, registered with CUDA when ``device`` is a GPU.

    ``pin_memory=True`` of torch rounds to a power of two and takes five times as long as
    registering touched pages, so this maps anonymous memory and registers it.

    Args:
        size: bytes, allocated exactly (rounded up to the page size of the system).
        device: the device that will access the memory; nothing is mapped for ``meta``.

    Raises:
        HostMemoryError: the system refuses the memory or its registration.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self._map: _Registration | None = None
        if size == 0:  # every layer is resident; there is nothing to map
            self.bytes: Tensor = torch.empty(0, dtype=torch.uint8)
            return
        if device.type == "meta":
            self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
            return
        try:
            self._map = _Registration(-1, size)
        except (OSError, ValueError, OverflowError) as error:
            raise HostMemoryError(
                f"the host pool needs {size} bytes and the system refused them ({error}); "
                "lower max_tokens or free host memory"
            ) from error
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8, count=size)
        if device.type == "cuda":
            code = self._map.register(self.bytes.data_ptr(), size)
            if code != 0:
                raise HostMemoryError(
                    f"cudaHostRegister of {size} bytes failed with code {code}; "
                    "check the locked-memory limit (ulimit -l) or lower max_tokens"
                )

    @property
    def registered(self) -> bool:
        """Whether the device can reach the bytes."""
        return self._map is not None and self._map.address != 0

    @property
    def numa_node(self) -> int | None:
        """NUMA node of the first page, or None where the system does not tell."""
        if self.size == 0:
            return None
        return numa_node_of(self.bytes.data_ptr())

    def close(self) -> None:
        """Unregister. Idempotent; the bytes stay readable until the last view is gone."""
        if self._map is not None:
            self._map.unregister()


def numa_node_of(address: int) -> int | None:
    """NUMA node that holds the page at ``address``, by the ``move_pages`` system call."""
    number = _MOVE_PAGES.get(platform.machine())
    if number is None:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    page = ctypes.c_void_p(address & ~(mmap.PAGESIZE - 1))
    status = ctypes.c_int(-1)
    done = libc.syscall(number, 0, 1, ctypes.byref(page), None, ctypes.byref(status), 0)
    return status.value if done == 0 and status.value >= 0 else None
