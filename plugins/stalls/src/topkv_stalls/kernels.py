"""Kernels that read the clock of the device before and after a load, see ``clocks.py``.

Both are launched plainly, so the one before a load starts when the plan has ended, and the one
behind it when all of its bytes are there. A CUDA graph replays them like any other kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def device_ns(p_now):
    """Nanoseconds of the device's clock, the same on all of its processors."""
    return tl.extra.cuda.globaltimer()


@triton.jit
def stall_begin_kernel(p_times, p_now, NOW: tl.constexpr):
    """Note the time at which a load begins. One program."""
    tl.store(p_times, NOW(p_now))


@triton.jit
def stall_end_kernel(p_times, p_misses, lanes, p_now, NOW: tl.constexpr, BLOCK: tl.constexpr):
    """Add the time that has passed since, if any of the lanes missed anything. One program."""
    now = NOW(p_now)
    missed = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, lanes, BLOCK):
        lane = first + tl.arange(0, BLOCK)
        missed += tl.load(p_misses + lane, lane < lanes, other=0)
    if tl.sum(missed, 0) > 0:
        tl.store(p_times + 1, tl.load(p_times + 1) + (now - tl.load(p_times)))
