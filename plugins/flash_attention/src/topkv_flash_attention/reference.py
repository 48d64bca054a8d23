"""Conversions between topkv's contract and FlashAttention's, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

Span = tuple[slice, int, bool]
"""Rows of a chunk, how many of the keys they see at most, and whether causally."""


def finish(
    out: Tensor, lse: Tensor, lengths: Tensor, queries: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``[N, Q, heads, D]`` and ``[N, Q, heads]``, 0 and -inf where a query sees no tokens.

    Args:
        out, lse: of the library.
        lengths: int32 ``[N]`` tokens.
        queries: int32 ``[N]`` of each lane, the others padding; None where Q is 1.
    """
    nth, queries = torch.arange(out.shape[1], device=out.device), 1 if queries is None else queries
    count = torch.as_tensor(queries, device=out.device).expand(len(out))[:, None]
    full = ((nth < count) & (lengths[:, None] - (count - 1 - nth) > 0))[..., None]
    return torch.where(full[..., None], out, 0.0), torch.where(full, lse, -torch.inf)


def spans(rows: int, keys: int, shift: int) -> list[Span]:
    """Calls that together are causal attention; rows in none of them see nothing.

    Row i sees key j iff ``j <= i + shift``. FlashAttention's causal mask is aligned to the
    bottom right corner: the last row sees the last key. So rows and keys are cut to where that is
    so, and the rows that see every key are a call without a mask.

    Args:
        rows, keys: m and n.
        shift: position of the first query minus that of the first key.
    """
    first = max(0, -shift)
    if not keys or first >= rows:
        return []
    if shift >= keys - 1:
        return [(slice(0, rows), keys, False)]
    edge = min(rows, keys - shift)
    parts = [(slice(first, edge), edge + shift, True)]
    return parts if edge == rows else [*parts, (slice(edge, rows), keys, False)]


def listed(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Lay the columns of each row out as a page table.

    Args:
        ids: int32 ``[m, W]``, -1 anywhere.

    Returns:
        int32 ``[m, W]``, descending, 0 behind the last one, and int32 ``[m]`` how many.
    """
    found = ids.sort(1, descending=True).values
    return found.clamp(min=0), (found >= 0).sum(1, dtype=torch.int32)


def aligned(rows: Tensor) -> Tensor:
    """``rows``, copied where the library's 16-byte loads could not read them in place."""
    step = 16 // rows.itemsize
    strides = [stride for size, stride in zip(rows.shape, rows.stride(), strict=True) if size > 1]
    whole = all(stride % step == 0 for stride in strides[:-1]) and rows.stride(-1) == 1
    if whole and rows.data_ptr() % 16 == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)
