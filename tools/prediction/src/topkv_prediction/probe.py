"""Measures the rates of a GPU and its link, in a fraction of a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from topkv.errors import CapabilityError
from topkv.kv.host_memory import HostMemory

DEVICE_BYTES, HOST_BYTES = 1 << 30, 1 << 26
"""Bytes that are read; of device memory at most a quarter of what is free."""

KERNEL_SHARE = 0.92
"""The share of a plain copy's rate that loads of many scattered entries reach: 50.8 of 55.1 GB/s
with entries of 8 KiB (``benchmarks/results/swap_in.jsonl.xz``)."""

CALLS = 5


def rates(device: torch.device) -> tuple[float, float]:
    """Measure the GB/s at which kernels read device memory, and host memory.

    The first is the rate of a plain sum, the second that of a copy, times ``KERNEL_SHARE``. Takes
    up to 1 GiB of the device meanwhile. Waits for the device; not to be called within a forward.

    Raises:
        CapabilityError: the device is no GPU.
    """
    if device.type != "cuda":
        reason = f"the rates of a GPU cannot be measured on {device}; give link and bandwidth"
        raise CapabilityError("no step can be predicted", [reason])
    free = torch.cuda.mem_get_info(device)[0]
    size = max(min(DEVICE_BYTES, free // 4), HOST_BYTES) // 4
    source = torch.zeros(size, dtype=torch.float32, device=device)
    memory = source.nbytes / _seconds(source.sum, device) / 1e9
    host = HostMemory(HOST_BYTES, device)
    try:
        target = source.view(torch.uint8)[:HOST_BYTES]
        copied = _seconds(lambda: target.copy_(host.bytes, non_blocking=True), device)
    finally:
        host.close()
    return memory, KERNEL_SHARE * HOST_BYTES / copied / 1e9


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of the shortest of a few calls, on the device."""
    times: list[float] = []
    with torch.cuda.device(device):
        for _ in range(1 + CALLS):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            call()
            ended.record()
            ended.synchronize()
            times.append(began.elapsed_time(ended) / 1e3)
    return min(times[1:])  # the first one may load a library
