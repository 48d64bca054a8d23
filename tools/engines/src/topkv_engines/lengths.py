"""Correct lengths of decode rows, and how many units of each can be selected, in plain torch."""

from __future__ import annotations

from torch import Tensor

from topkv.kv.step import FIELDS, StepUploader

SLOTS, LENGTHS, QUERIES = 0, 1, 6
"""Rows of a block, see ``StepUploader.packed``."""


def correct(uploader: StepUploader, queries: int, known: Tensor) -> None:
    """Correct an upload: the formula that the kernel of ``lengths_kernels`` is held to.

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
