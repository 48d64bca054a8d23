"""How long each layer waits for the link: an engine's loads between two looks at a clock.

What attends to a layer needs all of its misses, so a step stands still while they are loaded.
Off unless the setting ``stall_times`` asks for it: the two looks are launches of their own, a few
microseconds a layer, and the load no longer starts while its plan still runs. The clock of a GPU
may tick only once a microsecond: sums of many loads are right, a single one is coarse.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from topkv.config import LoweredConfig
from topkv.hooks.discovery import hookimpl
from topkv.hooks.transfer import Transfer
from topkv.kv.store import GroupStore
from topkv.types import LayerView, Plan


class Clock(Protocol):
    """Looks at the time on the device, in its order of work. Neither call waits for it.

    ``times``, here and below, are int64 ``[2]`` of a layer on the device, in nanoseconds: when
    its last load began, and how long all of those took that had something to load.
    """

    def begin(self, times: Tensor) -> None:
        """A load is about to begin."""

    def end(self, times: Tensor, misses: Tensor) -> None:
        """It has ended; ``misses`` are int32 ``[N]``, those of the lanes."""


class HostClock:
    """For CPUs, which have done a thing when its call returns."""

    def begin(self, times: Tensor) -> None:
        times[0] = perf_counter_ns()

    def end(self, times: Tensor, misses: Tensor) -> None:
        now = perf_counter_ns()
        if misses.any():
            times[1] += now - int(times[0])


class DeviceClock:
    """For GPUs: a kernel for each look, which a CUDA graph replays.

    Args:
        now: the ``triton.jit`` function that tells the time; that of the device by default.
    """

    BLOCK = 256
    """Lanes whose misses are looked at together."""

    def __init__(self, now: Any = None) -> None:
        from topkv.transfer import stall_kernels  # the reference works without Triton

        self._kernels = stall_kernels
        self._now = stall_kernels.device_ns if now is None else now

    def begin(self, times: Tensor) -> None:
        self._kernels.stall_begin_kernel[(1,)](times, times, NOW=self._now, num_warps=1)

    def end(self, times: Tensor, misses: Tensor) -> None:
        grid, lanes = (1,), misses.numel()
        self._kernels.stall_end_kernel[grid](
            times, misses, lanes, times, NOW=self._now, BLOCK=self.BLOCK, num_warps=1
        )


class TimedTransfer:
    """A transfer engine whose loads are timed; everything else is the engine's own.

    Args:
        transfer: the engine of a sparse group.
        times: ``GroupStore.stall_ns``.
        clock: of its device.
    """

    def __init__(self, transfer: Transfer, times: Tensor, clock: Clock) -> None:
        self._transfer, self._clock = transfer, clock
        self._times = list(times)  # a view of each layer, made once

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transfer, name)

    @hookimpl
    def load(self, layer: LayerView, plan: Plan) -> None:
        """See ``topkv.hooks.transfer.Transfer``."""
        times = self._times[layer.index]
        self._clock.begin(times)
        self._transfer.load(layer, plan)
        self._clock.end(times, plan.misses)


def timed(config: LoweredConfig, store: GroupStore, transfer: Transfer) -> Transfer:
    """The engine of a group, timed if ``config`` wants that and the group loads anything.

    Args:
        store: of the group, which gets the tensor that is counted in.
    """
    if not config.stall_times or store.group.residency != "sparse":
        return transfer
    device = store.counters.device
    store.stall_ns = torch.zeros((len(store.group.layers), 2), dtype=torch.int64, device=device)
    clock: Clock = DeviceClock() if device.type == "cuda" else HostClock()
    return cast(Transfer, TimedTransfer(transfer, store.stall_ns, clock))
