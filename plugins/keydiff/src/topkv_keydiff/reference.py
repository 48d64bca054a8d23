"""KeyDiff in plain torch: the formulas that the kernels are held to.

Shapes: n units, Hkv kv-heads, D head dim, P pages, L lanes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def directions(k: Tensor, valid: Tensor) -> Tensor:
    """The mean direction of the keys of each unit, ``mean_t k_t / |k_t|``, fp32 ``[n, Hkv, D]``.

    A key of zeros has no direction and counts as one.

    Args:
        k: ``[n, unit, Hkv, D]``.
        valid: bool ``[n, unit]``; keys in invalid places (NaN, say) have no influence.
    """
    keys = torch.where(valid[..., None, None], k.float(), 0.0)
    # The largest element first: squares of others would overflow, or vanish.
    keys = keys / keys.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    length = keys.square().sum(-1, keepdim=True).sqrt()
    return (keys / length.clamp(min=1e-30)).sum(1) / valid.sum(1)[:, None, None]


def difference(mean: Tensor) -> Tensor:
    """Return how unlike the keys of each page are to all keys, fp32 ``[L, P]``: from -1 to 1.

    With ``a = sum_j k_j / |k_j|`` over all tokens of the lane it is the mean of ``-cos(k, a)``
    over the tokens of the page and the heads of the lane; 0 where a is 0.

    Args:
        mean: ``[P, L, heads, D]`` mean directions of pages.
    """
    mean = mean.float()
    anchor = mean.sum(0)
    length = anchor.norm(dim=-1)
    like = torch.einsum("plhd,lhd->plh", mean, anchor) / length.clamp(min=1e-30)
    return -like.mean(-1).T
