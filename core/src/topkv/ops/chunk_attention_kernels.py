"""Kernel that folds two partial results of attention into one."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
"""Rows of a program."""


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Launch; see ``topkv.ops.chunk_attention.merge``. All tensors are contiguous."""
    rows, dim = lse.numel(), out.shape[-1]
    if rows:
        merge_kernel[(triton.cdiv(rows, ROWS),)](
            *(out, lse, part, part_lse, rows),
            DIM=dim,
            BLOCK_D=triton.next_power_of_2(dim),
            BLOCK_R=ROWS,
        )


@triton.jit(do_not_specialize=["rows"])
def merge_kernel(
    p_out,
    p_lse,
    p_part,
    p_part_lse,
    rows,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid (blocks of rows), a row being a head of a token."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    real = row < rows
    one = tl.load(p_lse + row, real, other=float("-inf"))
    other = tl.load(p_part_lse + row, real, other=float("-inf"))
    most = tl.maximum(one, other)
    floor = tl.where(most == float("-inf"), 0.0, most)  # both see nothing, and weigh 0
    weight, part_weight = tl.exp(one - floor), tl.exp(other - floor)
    total = weight + part_weight
    share = tl.where(total > 0, total, 1.0)
    d = tl.arange(0, BLOCK_D)[None, :]
    cell, at = real[:, None] & (d < DIM), row[:, None] * DIM + d
    value = tl.load(p_out + at, cell, other=0.0) * (weight / share)[:, None]
    value += tl.load(p_part + at, cell, other=0.0) * (part_weight / share)[:, None]
    tl.store(p_out + at, value, cell)
    tl.store(p_lse + row, floor + tl.log(total), real)
