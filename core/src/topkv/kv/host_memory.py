"""Host memory that a GPU can read and write in place: exact size, mapped and registered."""

from __future__ import annotations

import torch
from torch import Tensor

from topkv.errors import HostMemoryError
from topkv.kv.host_mapping import HostMapping, cpus_near, threads_of, unregister_unclosed


class HostMemory:
    """A byte tensor in host memory, registered with CUDA when ``device`` is a GPU.

    ``pin_memory=True`` of torch rounds to a power of two and provides pages one by one, so this
    maps anonymous memory, has many threads touch it in huge pages and registers it at once.
    Memory that is not registered stays untouched until somebody writes to it.

    The threads run on the cores near the GPU, so that the memory is on its NUMA node while that
    has room.

    Large pools report how far they are through ``logging``, logger ``topkv``, level ``INFO``.
    After an interrupt nothing stays registered, and the pages are given back. In a child process
    reading registered memory is a segmentation fault.

    Args:
        size: bytes, allocated exactly (rounded up to the page size of the system).
        device: the device that will access the memory; nothing is mapped for ``meta``.
        file: descriptor of a file to map in place of memory of this process alone, see
            ``HostMapping.of``.

    Raises:
        HostMemoryError: the system refuses the memory, the threads or the registration.
    """

    def __init__(self, size: int, device: torch.device, file: int | None = None) -> None:
        self.size = size
        self._map: HostMapping | None = None
        if size == 0:  # every layer is resident; there is nothing to map
            self.bytes: Tensor = torch.empty(0, dtype=torch.uint8)
            return
        if device.type == "meta":
            self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
            return
        if device.type == "cuda":
            unregister_unclosed()  # their memory may be what is missing
        try:
            self._map = HostMapping.of(size, file)
        except (OSError, ValueError, OverflowError) as error:
            raise HostMemoryError(
                f"the host pool needs {size} bytes and the system refused them ({error}); "
                "lower max_tokens or free host memory"
            ) from error
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8, count=size)
        if device.type == "cuda":
            try:
                self._register(self._map, device)
            except BaseException:
                self._map.discard()
                raise

    def _register(self, memory: HostMapping, device: torch.device) -> None:
        cpus = cpus_near(device)
        try:
            memory.advise()
            memory.touch(cpus)
        except (OSError, RuntimeError) as error:
            raise HostMemoryError(
                f"touching the {self.size} bytes of the host pool by {threads_of(cpus)} threads "
                f"failed ({error}); check the limits on processes (ulimit -u) and on cores"
            ) from error
        code = memory.register()
        if code != 0:
            raise HostMemoryError(
                f"cudaHostRegister of {self.size} bytes failed with code {code}; "
                "check the locked-memory limit (ulimit -l) or lower max_tokens"
            )

    @property
    def registered(self) -> bool:
        """True if the device can reach the bytes."""
        return self._map is not None and self._map.address != 0

    def close(self) -> None:
        """Unregister. Idempotent; the bytes stay readable until the last view is gone."""
        if self._map is not None:
            self._map.unregister()
