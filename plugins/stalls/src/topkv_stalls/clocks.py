"""Clocks of devices, which are looked at before and after each load.

The two looks are launches of their own, a few microseconds a layer, and the load no longer starts
while its plan still runs. The clock of a GPU may tick only once a microsecond: sums of many loads
are right, a single one is coarse.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any, Protocol

from torch import Tensor


class Clock(Protocol):
    """Reads the time on the device, in its order of work. Neither call waits for the device.

    ``times``, here and below, are int64 ``[2]`` of a layer on the device, in nanoseconds: when
    its last load began, and how long all of those took that had something to load.
    """

    def begin(self, times: Tensor) -> None:
        """Note that a load is about to begin."""

    def end(self, times: Tensor, misses: Tensor) -> None:
        """Note that the load has ended; ``misses`` are int32 ``[N]``, by lane."""


class HostClock:
    """Clock of CPUs, which have done a thing when its call returns."""

    def begin(self, times: Tensor) -> None:
        times[0] = perf_counter_ns()

    def end(self, times: Tensor, misses: Tensor) -> None:
        now = perf_counter_ns()
        if misses.any():
            times[1] += now - int(times[0])


class DeviceClock:
    """Clock of GPUs: a kernel for each look, which a CUDA graph replays.

    Args:
        now: the ``triton.jit`` function that returns the time; that of the device by default.
    """

    BLOCK = 256
    """Lanes whose misses are looked at together."""

    def __init__(self, now: Any = None) -> None:
        from topkv_stalls import kernels  # the other clock works without Triton

        self._kernels = kernels
        self._now = kernels.device_ns if now is None else now

    def begin(self, times: Tensor) -> None:
        self._kernels.stall_begin_kernel[(1,)](times, times, NOW=self._now, num_warps=1)

    def end(self, times: Tensor, misses: Tensor) -> None:
        grid, lanes = (1,), misses.numel()
        self._kernels.stall_end_kernel[grid](
            times, misses, lanes, times, NOW=self._now, BLOCK=self.BLOCK, num_warps=1
        )
