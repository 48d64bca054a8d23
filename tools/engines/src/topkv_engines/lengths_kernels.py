"""The kernel that corrects the lengths of decode rows, see ``topkv_engines.lengths``."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from topkv.kv.step import FIELDS, StepUploader
from topkv_engines.lengths import LENGTHS, QUERIES, SLOTS


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
