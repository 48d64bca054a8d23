"""Device functions that read and write entries of the host pool which are as on the device.

The kernels that copy take the functions of one host format (``topkv.hooks.host_format``) and are
compiled for them, so that plain copies have no code for coded entries.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topkv.hooks.host_format import EntryKernels


@triton.jit
def read_plain(p_entry, at, d, live, mask, SIZE: tl.constexpr, D: tl.constexpr):
    """Read elements as they are."""
    p_data = (p_entry + at)[:, None] + d[None, :]
    return tl.load(p_data, mask, other=0, cache_modifier=".cg")


@triton.jit
def decode_plain(data, at, d, DTYPE: tl.constexpr, D: tl.constexpr):
    """Return the elements of ``read_plain`` unchanged."""
    return data


@triton.jit
def write_plain(p_entry, at, d, x, live, mask, SIZE: tl.constexpr, D: tl.constexpr):
    """Write elements as they are."""
    tl.store((p_entry + at)[:, None] + d[None, :], x, mask)


PLAIN_KERNELS = EntryKernels(read_plain, decode_plain, write_plain, rows=512, warps=4)
