"""Triton for files that hold device functions beside their torch: ``jit``, ``tl``, ``store``.

Without Triton such a file can be imported all the same: its device functions are then plain
functions that nothing calls, and the reference runs.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl

    jit: Any = triton.jit
except ImportError:
    tl: Any = None  # type: ignore[no-redef]

    def jit(function):
        """Leave a device function as it is."""
        return function


@jit
def bf16_bits(x):
    """int16 bits of fp32 ``x`` in bfloat16, ties to even. A NaN keeps its sign alone."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).to(tl.int16)


@jit
def store(p, x, inside):
    """Store fp32 ``x`` in a pool: cast to its dtype, or as bits of bfloat16."""
    if p.dtype.element_ty == tl.int16:
        tl.store(p, bf16_bits(x), inside)
    else:
        tl.store(p, x.to(p.dtype.element_ty), inside)


__all__ = ["bf16_bits", "jit", "store", "tl"]
