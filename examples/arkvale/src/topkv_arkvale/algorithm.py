"""ArkVale: a unit is a box around its keys, and is worth what its best corner is worth.

Chen et al., "ArkVale: Efficient Generative LLM Inference with Recallable Key-Value Eviction",
NeurIPS 2024: the digest "cuboid-mean". Digest and score are the paper's; what is made of them is
as in topkv's Quest: query heads of a lane are averaged after a softmax, the open unit is always
attended and never scored, the first units are forced.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from topkv.hooks.algorithm import RepresentationSpec
from topkv_authoring.language import jit, store, tl
from topkv_authoring.selectors import ScoredUnits
from topkv_authoring.units import UnitKernels


def digest_of(keys: Tensor, valid: Tensor) -> Tensor:
    """Centre ``c = (m + M) / 2`` and radius ``r = mean |c - k|``, fp32 ``[n, Hkv, 2, D]``.

    Args:
        keys: ``[n, unit, Hkv, D]``; m and M are their minimum and maximum, channel by channel.
        valid: bool ``[n, unit]``; other keys (NaN, say) have no influence.
    """
    valid = valid[:, :, None, None]
    low = torch.where(valid, keys.float(), float("inf")).amin(1)
    high = torch.where(valid, keys.float(), float("-inf")).amax(1)
    centre = (low + high) / 2
    # Summed in float64, where the order of the keys does not show in the result.
    distance = torch.where(valid, (centre[:, None] - keys.float()).abs().double(), 0.0)
    radius = distance.sum(1) / valid.sum(1)
    return torch.stack([centre, radius.float()], dim=2)


def head_scores(q: Tensor, digest: Tensor) -> Tensor:
    """``sum_i max(q_i (c_i - r_i), q_i (c_i + r_i)) = q.c + |q|.r``, fp32 ``[B, H, U]``.

    Args:
        q: ``[B, H, D]``.
        digest: ``[B, U, Hkv, 2, D]``.
    """
    centre, radius = digest.float().unbind(3)
    q = q.float().unflatten(1, (centre.shape[2], -1))
    scores = torch.einsum("bhgd,buhd->bhgu", q, centre)
    scores += torch.einsum("bhgd,buhd->bhgu", q.abs(), radius)
    return scores.flatten(1, 2)


class ArkVale(ScoredUnits):
    """Selects the closed units of the highest mean softmaxed score, kept as its logarithm.

    Of equal scores the lower unit wins. The first ``sink_units`` units are forced. Every shape
    follows from the configuration, and nothing waits for the device.
    """

    def representations(self) -> list[RepresentationSpec]:
        shape = (self.group.num_kv_heads, 2, self.group.head_dim)
        return [RepresentationSpec("digest", "unit", shape, self.model.dtype)]

    def represent(self, keys: Tensor, valid: Tensor) -> dict[str, Tensor]:
        return {"digest": digest_of(keys, valid)}

    def score(self, q: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        return head_scores(q, kept["digest"]) * self.model.scale


@jit
def write_digest(k, v, valid, tokens, pools, at, OPTIONS: tl.constexpr, D: tl.constexpr):
    """``digest_of`` of a unit."""
    low = tl.min(tl.where(valid, k, float("inf")), 0)
    high = tl.max(tl.where(valid, k, float("-inf")), 0)
    centre = (low + high) / 2
    distance = tl.where(valid, tl.abs(centre[None, :] - k).to(tl.float64), 0.0)
    radius = (tl.sum(distance, 0) / tokens).to(tl.float32)
    d = tl.arange(0, k.shape[1])
    store(pools[0] + at * (2 * D) + d, centre, d < D)
    store(pools[0] + at * (2 * D) + D + d, radius, d < D)


@jit
def add_corners(scores, q, pools, at, d, inside, OPTIONS: tl.constexpr, D: tl.constexpr):
    """``head_scores`` of a tile of units, by two products."""
    p_tile = pools[0] + at[:, None] * (2 * D) + d
    centre = tl.load(p_tile, inside, other=0.0).to(q.dtype)
    radius = tl.load(p_tile + D, inside, other=0.0).to(q.dtype)
    scores = tl.dot(centre, q, acc=scores, input_precision="ieee")
    return tl.dot(radius, tl.where(q < 0, -q, q), acc=scores, input_precision="ieee")


class ArkValeKernels(UnitKernels, ArkVale):
    """ArkVale by the two device functions."""

    represent_unit, score_tile = write_digest, add_corners
