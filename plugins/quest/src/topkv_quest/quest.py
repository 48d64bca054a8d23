"""Quest: a unit is worth the largest logit that any of its keys could reach.

Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", ICML 2024,
arXiv 2406.10774. Differences from its code are in the README. Each device function stands behind
its formula in torch and gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from topkv.hooks.algorithm import RepresentationSpec
from topkv_authoring.bounds import bf16_up, key_bounds, minmax, raised
from topkv_authoring.language import bf16_bits, jit, store, tl
from topkv_authoring.selectors import ScoredUnits, key_refusals
from topkv_authoring.units import UnitKernels


class Quest(ScoredUnits):
    """Selects the closed units of the highest mean softmaxed bound.

    Each unit and kv-head keeps the channel-wise minimum m and maximum M of the keys. A query
    head scores a unit with ``sum_i max(q_i m_i, q_i M_i)``, an upper bound of q·k for every key
    k in it; a lane ranks by ``combine``. Of latent attention a key is the row ``[latent | rope]``
    of a token, and queries are those that were absorbed into that space. The first ``sink_units``
    units are forced. Of equal scores the lower unit wins. Keys are finite, and below the largest
    bfloat16 in magnitude.

    Bounds are rounded outward, so that they hold up to the rounding of fp32 sums. ``"bf16"``
    keeps the model's own 16-bit dtype, where minima and maxima are exact, and bfloat16 for fp32
    models. ``"int8"`` keeps integers times one bfloat16 scale per unit and head, the smallest s
    with ``127 s >= max |k|``. Updated token by token or built at once, the bits are the same.
    """

    def refusals(self) -> list[str]:
        return key_refusals(self.model, self.group, "bounds are")

    @property
    def kept(self) -> torch.dtype:
        """The dtype of bounds."""
        if self.params.metadata == "int8":
            return torch.int8
        return self.model.dtype if self.model.dtype.itemsize == 2 else torch.bfloat16

    def representations(self) -> list[RepresentationSpec]:
        heads, dim = self.group.num_kv_heads, self.group.head_dim
        scale = RepresentationSpec("scale", "unit", (heads,), torch.bfloat16)
        bounds = RepresentationSpec("bounds", "unit", (heads, 2, dim), self.kept)
        return [bounds, scale] if self.kept is torch.int8 else [bounds]

    def represent(self, keys: Tensor, valid: Tensor) -> dict[str, Tensor]:
        low, high = minmax(keys, valid)
        new = {}
        if self.kept is torch.int8:
            new["scale"] = scale = scale_of(torch.maximum(low.abs(), high.abs()).amax(-1))
            low, high = -steps(-low, scale[..., None]), steps(high, scale[..., None])
        elif self.kept is torch.bfloat16:
            low, high = -bf16_up(-low), bf16_up(high)
        return {"bounds": torch.stack([low, high], dim=-2), **new}

    def score(self, q: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        return head_scores(q, kept["bounds"], kept.get("scale")) * self.model.scale


@jit
def write_bounds(k, v, valid, tokens, pools, at, OPTIONS: tl.constexpr, D: tl.constexpr):
    """Write bounds of a unit: ``Quest.represent``."""
    d = tl.arange(0, k.shape[1])
    in_d = d < D
    low, high = key_bounds(k, valid)
    low, high = tl.where(in_d, low, 0.0), tl.where(in_d, high, 0.0)
    if OPTIONS[1]:
        scale = _scale_of(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 0))
        tl.store(pools[1] + at, bf16_bits(scale))
        low, high = -_steps(-low, scale).to(tl.int32), _steps(high, scale).to(tl.int32)
    elif OPTIONS[0]:
        low, high = -raised(-low), raised(high)
    store(pools[0] + at * (2 * D) + d, low, in_d)
    store(pools[0] + at * (2 * D) + D + d, high, in_d)


def head_scores(q: Tensor, bounds: Tensor, scale: Tensor | None) -> Tensor:
    """``sum_i max(q_i m_i, q_i M_i)`` per query head, fp32 ``[n, H, U]``, of q ``[n, H, D]``,
    bounds ``[n, U, Hkv, 2, D]`` and their scale ``[n, U, Hkv]``, if any."""
    q = q.float().unflatten(1, (bounds.shape[2], -1))
    low, high = bounds.float().unbind(3)
    scores = torch.einsum("nhgd,nuhd->nhgu", q.clamp(min=0), high)
    scores += torch.einsum("nhgd,nuhd->nhgu", q.clamp(max=0), low)
    if scale is not None:
        scores *= scale.float().permute(0, 2, 1)[:, :, None]
    return scores.flatten(1, 2)


@jit
def add_bounds(scores, q, pools, at, d, inside, OPTIONS: tl.constexpr, D: tl.constexpr):
    """``max(q m, q M)`` is ``max(q, 0) M + min(q, 0) m``: two products for the tensor cores, with
    exact factors and fp32 sums."""
    zero = tl.zeros_like(q)
    p_tile = pools[0] + at[:, None] * (2 * D) + d
    low = tl.load(p_tile, inside, other=0).to(q.dtype)
    high = tl.load(p_tile + D, inside, other=0).to(q.dtype)
    scores = tl.dot(high, tl.where(q > 0, q, zero), acc=scores, input_precision="ieee")
    return tl.dot(low, tl.where(q < 0, q, zero), acc=scores, input_precision="ieee")


@jit
def times_scale(scores, pools, at, inside, OPTIONS: tl.constexpr, D: tl.constexpr):
    """Scores by integers, times the scale of their unit."""
    if OPTIONS[1]:
        scores *= tl.load(pools[1] + at, inside, other=0.0).to(tl.float32)[:, None]
    return scores


def scale_of(amax: Tensor) -> Tensor:
    """The smallest bfloat16 s with ``127 s >= amax >= 0``, as fp32.

    A quotient is rounded in the order of what it stands for, so that it is never above s; where
    it is below, s is the next one. ``127 s`` is exact.
    """
    first = bf16_up(amax / 127)
    above = (first.view(torch.int32) + 65536).view(torch.float32)
    return torch.where(127 * first >= amax, first, above)


@jit
def _scale_of(amax):
    first = raised(tl.div_rn(amax, 127.0))
    above = (first.to(tl.int32, bitcast=True) + 65536).to(tl.float32, bitcast=True)
    return tl.where(127.0 * first >= amax, first, above)


def steps(x: Tensor, scale: Tensor) -> Tensor:
    """The smallest integer n with ``n * scale >= x``, as fp32; 0 where the scale is 0."""
    n = (x / torch.where(scale > 0, scale, 1.0)).ceil()
    return torch.where(n * scale < x, n + 1, n) * (scale > 0)


@jit
def _steps(x, scale):
    n = tl.ceil(tl.div_rn(x, tl.where(scale > 0, scale, 1.0) + tl.zeros_like(x)))
    return tl.where(scale > 0, tl.where(n * scale < x, n + 1, n), 0.0)


class QuestKernels(UnitKernels, Quest):
    """Quest by the device functions above."""

    represent_unit, score_tile, finish_tile = write_bounds, add_bounds, times_scale

    @property
    def options(self) -> tuple[bool, bool]:  # type: ignore[override]
        """A pair: True if bounds are bfloat16, and True if they are int8."""
        return self.kept is torch.bfloat16, self.kept is torch.int8
