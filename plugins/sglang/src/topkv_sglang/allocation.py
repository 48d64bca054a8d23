"""Places of tokens are given out in host memory, whatever the device of the model.

SGLang's allocator and its map of places would be on the device, where the scheduler cannot look up
a page without waiting for it. Nothing on the device reads a place here, so both are tensors of the
host, and the functions that give places out work on the host's mirrors of a batch. The scheduler
that calls them has one thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_on_host = 0
"""How many batches are given places at this moment, 0 or 1."""


@contextmanager
def on_host(batch: Any) -> Iterator[None]:
    """Have SGLang's functions find the mirrors of a ``ScheduleBatch`` in place of what is on its
    device: lengths, and rows of requests where it has some."""
    global _on_host
    kept = batch.device, batch.seq_lens, batch.req_pool_indices
    batch.device, batch.seq_lens = "cpu", batch.seq_lens_cpu
    batch.req_pool_indices = batch.req_pool_indices_cpu
    _on_host += 1
    try:
        yield
    finally:
        batch.device, batch.seq_lens, batch.req_pool_indices = kept
        _on_host -= 1


def is_on_host() -> bool:
    """Return True while a batch is given places."""
    return bool(_on_host)


def upload(tensor: Tensor, device: Any) -> Tensor:
    """Copy a tensor from the host to a device, without waiting for it."""
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def host_allocator(make: Any, configurator: Any) -> Any:
    """Make SGLang's allocator on the host.

    Args:
        make: makes it, on the device of the configurator.
        configurator: SGLang's ``KVCacheConfigurator``.
    """
    device, configurator.device = configurator.device, "cpu"
    try:
        allocator = make()
    finally:
        configurator.device = device
    allocator.use_triton_kernels = False
    return allocator
