"""Exact top-k in plain torch: the formula that the kernels are held to."""

from __future__ import annotations

import torch
from torch import Tensor


def topk(scores: Tensor, lengths: Tensor, ids: Tensor) -> None:
    """Rank by (score descending, index ascending), keep K, emit in ascending index order.

    Args and results as in :func:`topkv.ops.topk.topk`. float64 holds every fp32 value, a NaN
    becomes -inf, and adding zero turns -0.0 into +0.0, so that a stable sort is the definition.
    """
    width = scores.shape[1]
    select = ids.shape[1]
    index = torch.arange(width, device=scores.device)
    valid = index < lengths[:, None]
    keys = torch.where(scores.isnan(), float("-inf"), scores.double()) + 0.0
    # Rows behind their length come last whatever they hold, behind a valid -inf too.
    by_score = torch.where(valid, keys, float("-inf")).argsort(dim=1, descending=True, stable=True)
    by_score = by_score.gather(1, (~valid).gather(1, by_score).int().argsort(dim=1, stable=True))
    top = by_score[:, :select]
    top = torch.where(valid.gather(1, top), top, width).sort(dim=1).values
    ids[:, : top.shape[1]] = torch.where(top < width, top, -1).to(ids.dtype)
    ids[:, top.shape[1] :] = -1
