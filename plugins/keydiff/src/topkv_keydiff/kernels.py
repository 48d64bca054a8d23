"""Mean directions of units in Triton, beside ``reference.directions``.

Pages are scored by torch, outside of steps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topkv_authoring.language import store
from topkv_authoring.units import KeptByKernels
from topkv_keydiff.stage import KeyDiff


@triton.jit
def write_direction(k, v, valid, tokens, pools, at, OPTIONS: tl.constexpr, D: tl.constexpr):
    """``reference.directions`` of a unit."""
    largest = tl.max(tl.abs(k), 1)
    k = k / tl.maximum(largest, 1.1754943508222875e-38)[:, None]
    length = tl.sqrt(tl.sum(k * k, 1))
    mean = tl.sum(k / tl.maximum(length, 1e-30)[:, None], 0) / tokens
    d = tl.arange(0, k.shape[1])
    store(pools[0] + at * D + d, mean, d < D)


class KeyDiffKernels(KeptByKernels, KeyDiff):
    """KeyDiff whose directions are kept by kernels."""

    represent_unit = write_direction
