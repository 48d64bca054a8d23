"""Conversions between topkv's contract and FlashAttention's, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

Span = tuple[slice, int, bool]
"""Rows of a chunk, how many of the keys they see at most, and whether causally."""

LOGIT_BYTES = 256 << 20
"""Most bytes of the logits of a block of prompt rows in ``masked``."""


def finish(out: Tensor, lse: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """``[N, heads, D]`` and ``[N, heads]``, 0 and -inf where a lane has no tokens."""
    full = (lengths > 0)[:, None]
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


def listed(keep: Tensor) -> tuple[Tensor, Tensor]:
    """The kept columns of each row as a page table; waits for the device.

    Args:
        keep: bool ``[m, n]``.

    Returns:
        int32 ``[m, W]``, ascending, 0 behind the last kept one, and int32 ``[m]`` how many.
    """
    counts = keep.sum(1, dtype=torch.int32)
    width = max(1, int(counts.max())) if keep.numel() else 1
    rows, columns = keep.nonzero(as_tuple=True)
    place = keep.cumsum(1)[rows, columns] - 1
    found = torch.zeros((keep.shape[0], width), dtype=torch.int32, device=keep.device)
    found[rows, place] = columns.int()
    return found, counts


def masked(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, keep: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention in fp32 where ``keep`` is True, for libraries that read no single tokens.

    Args:
        q: ``[m, H, D]``.
        k, v: ``[n, Hkv, D]``.
        softcap: logits s become ``softcap * tanh(s / softcap)``; 0 for plain ones.
        keep: bool ``[m, n]``.

    Returns:
        fp32 ``[m, H, Dv]`` and ``[m, H]``; 0 and -inf where nothing is kept.
    """
    group = q.shape[1] // k.shape[1]
    keys, values = k.float(), v.float()
    out = torch.empty((*q.shape[:2], v.shape[-1]), dtype=torch.float32, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    block = max(1, LOGIT_BYTES // (8 * max(1, q.shape[1] * len(k))))
    for first in range(0, len(q), block):
        at = slice(first, first + block)
        queries = q[at].float().unflatten(1, (-1, group))
        logits = torch.einsum("mhgd,nhd->mhgn", queries, keys) * scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~keep[at][:, None, None], -torch.inf)
        weights = torch.softmax(logits, -1).nan_to_num(0.0)
        out[at] = torch.einsum("mhgn,nhd->mhgd", weights, values).flatten(1, 2)
        lse[at] = torch.logsumexp(logits, -1).flatten(1, 2)
    return out, lse


def aligned(rows: Tensor) -> Tensor:
    """``rows``, copied where the library's 16-byte loads could not read them in place."""
    step = 16 // rows.itemsize
    strides = [stride for size, stride in zip(rows.shape, rows.stride(), strict=True) if size > 1]
    whole = all(stride % step == 0 for stride in strides[:-1]) and rows.stride(-1) == 1
    if whole and rows.data_ptr() % 16 == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)
