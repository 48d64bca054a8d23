"""Conversions between topkv's contract and FlashInfer's, in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def seen(lengths: Tensor, queries: Tensor, most: int) -> Tensor:
    """Tokens that each query sees in each lane of its row, int32 ``[B * most * lanes of a row]``:
    all but those of the queries behind it, and none where it is padding.

    Args:
        lengths: int32 ``[N]`` tokens.
        queries: int32 ``[B]``, of ``most``.
    """
    nth = torch.arange(most, device=lengths.device)
    behind = (queries[:, None] - 1 - nth)[..., None]
    tokens = lengths.view(len(queries), 1, -1) - behind
    return torch.where(behind >= 0, tokens, 0).clamp(min=0).int().flatten()


def spread(table: Tensor, lengths: Tensor, unit: int) -> tuple[Tensor, Tensor]:
    """A page table as compressed rows of a constant count.

    Args:
        table: int32 ``[N, W]`` pages.
        lengths: int32 ``[N]`` tokens.
        unit: tokens of a page.

    Returns:
        ``indices`` ``[N * W]``, 0 where unused, and the tokens on the last of W pages, ``[N]``,
        negative where the lane ends before; int32.
    """
    width = table.shape[1]
    used = torch.arange(width, device=table.device) * unit < lengths[:, None]
    return torch.where(used, table, 0).flatten(), lengths - (width - 1) * unit


def works(
    lane: Tensor, first: Tensor, behind: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Planned works, cut down to the true lengths.

    Args:
        lane: int32 ``[works]``.
        first, behind: int32 ``[works]``, the tokens of the lane that a work attends as planned.
        lengths: int32 ``[N]`` true tokens.

    Returns:
        Length of the lane, first token and the one behind the last, ``[works]``; 0 and 0 for a
        work that has no token left, which is how the library writes a lane of length 0.
    """
    length = lengths[lane.long()]
    left = first < length
    return length, torch.where(left, first, 0), torch.where(left, behind.minimum(length), 0)


def packed(mask: Tensor) -> Tensor:
    """The bits of a mask in row-major order, eight to a byte from the lowest, uint8.

    Args:
        mask: bool, any shape.
    """
    bits = mask.reshape(-1)
    bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8).to(torch.uint8)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (bits * weights).sum(1, dtype=torch.uint8)
