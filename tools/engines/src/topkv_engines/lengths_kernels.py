"""Correct the lengths of decode rows on the device, and how many units of each can be selected."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from topkv.kv.step import FIELDS, StepUploader

SLOTS, LENGTHS, QUERIES = 0, 1, 6
"""Rows of a block, see ``StepUploader.packed``."""


def correct(uploader: StepUploader, queries: int, known: Tensor) -> None:
    """Correct an upload in plain torch: the formula that the kernel is held to.

    Args:
        uploader: what it has uploaded last is corrected.
        queries: Q of that forward.
        known: int32 ``[B]`` length of each row with what it appends; any number of padded rows.
    """
    batch = len(known)
    blocks = uploader.packed[: 1 + (queries > 1 and len(uploader.singles)), :, :batch]
    lost = blocks[0, LENGTHS] - known
    for number, block in enumerate(blocks):
        live = block[SLOTS] >= 0
        length = block[LENGTHS]
        length.copy_((length - lost).where(live, length))
        for row, (unit, competes) in enumerate(uploader.groups, start=FIELDS):
            behind = (length - block[QUERIES]).clamp(min=0) // unit
            whole = competes and (number > 0 or queries == 1)
            block[row].copy_((length if whole else behind).where(live, block[row]))


@triton.jit(do_not_specialize=["batch", "blocks", "queries"])
def correct_kernel(
    p_packed,
    p_known,
    p_groups,
    batch,
    blocks,
    queries,
    s_block,
    s_field,
    groups,
    SLOTS: tl.constexpr,
    LENGTHS: tl.constexpr,
    QUERIES: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for BLOCK rows; of all blocks one after another, as the first one says what is
    to be taken from the lengths of all."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < batch
    known = tl.load(p_known + row, there, 0)
    lost = tl.load(p_packed + LENGTHS * s_field + row, there, 0) - known
    for number in range(blocks):
        p_block = p_packed + number * s_block.to(tl.int64) + row
        live = there & (tl.load(p_block + SLOTS * s_field, there, -1) >= 0)
        length = tl.load(p_block + LENGTHS * s_field, live, 0) - lost
        behind = tl.maximum(length - tl.load(p_block + QUERIES * s_field, live, 0), 0)
        tl.store(p_block + LENGTHS * s_field, length, live)
        single = (number > 0) | (queries == 1)
        for group in range(groups):
            unit = tl.load(p_groups + 2 * group)
            whole = (tl.load(p_groups + 2 * group + 1) != 0) & single
            limit = tl.where(whole, length, behind // unit)
            tl.store(p_block + (FIELDS + group) * s_field, limit, live)


def launch(uploader: StepUploader, queries: int, known: Tensor, groups: Tensor) -> None:
    """Launch the kernel; args as of ``correct``, at least one row.

    Args:
        groups: int32 ``[G, 2]``, ``uploader.groups`` on the device.
    """
    packed, batch = uploader.packed, len(known)
    correct_kernel[(triton.cdiv(batch, 32),)](
        packed,
        known,
        groups,
        batch,
        1 + (queries > 1) * len(uploader.singles),
        queries,
        packed.stride(0),
        packed.stride(1),
        len(groups),
        SLOTS=SLOTS,
        LENGTHS=LENGTHS,
        QUERIES=QUERIES,
        FIELDS=FIELDS,
        BLOCK=32,
        num_warps=1,
    )
