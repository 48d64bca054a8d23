"""Oracles that share no code with the core: an ordered buffer, and exact attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, field
from torch import Tensor


@define
class LaneModel:
    """One lane's LRU buffer as two Python lists.

    Attributes:
        capacity: C.
        order: slots, coldest first.
        unit_in: logical unit of each slot, None where free.
    """

    capacity: int
    order: list[int] = field(factory=list)
    unit_in: list[int | None] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.order = list(range(self.capacity))
        self.unit_in = [None] * self.capacity

    def select(
        self, ids: Sequence[int], limit: int, low: int
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Make one plan; return the distinct valid units and the ``(unit, slot)`` of each miss.

        Units from ``low`` on are in the ring and do not touch the buffer.
        """
        units = list(dict.fromkeys(i for i in ids if 0 <= i < limit))
        buffered = [unit for unit in units if unit < low]
        hits = {self.unit_in.index(unit) for unit in buffered if unit in self.unit_in}
        missed = [unit for unit in buffered if unit not in self.unit_in]
        stale = [slot for slot in self.order if slot not in hits]
        kept = [slot for slot in self.order if slot in hits]
        victims, stale = stale[: len(missed)], stale[len(missed) :]
        for unit, slot in zip(missed, victims, strict=True):
            self.unit_in[slot] = unit
        self.order = stale + victims + kept
        return units, list(zip(missed, victims, strict=True))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention in float64, as the formula reads.

    Args:
        q: ``[m, H, D]``.
        k, v: ``[n, Hkv, D]``.
        scale: factor of the logits.
        mask: bool ``[m, n]`` or ``[m, H, n]``, True where a query sees a key.
        softcap: of the logits, see ``topkv.types.ModelShape``.

    Returns:
        float64 ``[m, H, D]`` and the natural log-sum-exp ``[m, H]``; 0 and -inf where nothing
        is seen.
    """
    group = q.shape[1] // k.shape[1]
    keys = k.double().repeat_interleave(group, dim=1)
    values = v.double().repeat_interleave(group, dim=1)
    logits = torch.einsum("mhd,nhd->mhn", q.double(), keys) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is not None:
        logits = logits.masked_fill(~(mask if mask.ndim == 3 else mask[:, None]), -torch.inf)
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return torch.einsum("mhn,nhd->mhd", weights, values), lse
