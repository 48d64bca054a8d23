"""FlashAttention-4 and FlashAttention-2, by their Python functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from topkv.types import GroupShape, ModelShape
from topkv_flash_attention.library import (
    Capability,
    Query,
    Result,
    by_pages,
    head_refusals,
    shown,
)

TILE = 128
"""Keys of a tile of FlashAttention-4."""


@frozen
class FlashAttention4:
    """FlashAttention-4 (``flash_attn.cute``), compiled at the first call of each kind.

    Attributes:
        forward: ``_flash_attn_fwd``.
    """

    name: str
    forward: Callable[..., Any]
    smallest_unit: int = 1

    def refusals(
        self, model: ModelShape, group: GroupShape, capability: Capability | None
    ) -> list[str]:
        reasons = []
        if capability is not None and capability[0] not in (9, 10, 11):
            reasons.append(f"it is for capability 9 to 11, got {shown(capability)}")
        if group.unit == TILE:
            reasons.append(
                f"pages of {TILE} tokens come by TMA with what is behind a length, and 0 times "
                "NaN is NaN; choose another unit (or, for dense layers, page_tokens)"
            )
        if model.attention == "mla":
            return [*reasons, "latent attention by page tables is not among what it takes"]
        most = 128 if capability is not None and capability[0] >= 10 else 256
        return reasons + head_refusals(model, most)

    def attend(
        self,
        q: Query,
        k: Tensor,
        v: Tensor,
        table: Tensor,
        lengths: Tensor,
        scale: float,
        softcap: float,
        splits: int,
        zeros: Tensor,
        out: Tensor,
    ) -> Result:
        # On Hopper it asserts that nothing is split.
        split = torch.cuda.get_device_capability(q.main.device)[0] >= 10
        result = self.forward(
            *(q.main, by_pages(k), by_pages(v)),
            seqused_k=lengths,
            max_seqlen_k=table.shape[1] * k.shape[2],
            page_table=table,
            softmax_scale=scale,
            softcap=softcap or None,
            num_splits=splits if split else 1,
            return_lse=True,
            out=out,
        )
        return result[0], result[1][:, :, 0]

    def chunk(
        self, q: Query, k: Tensor, v: Tensor, scale: float, softcap: float, causal: bool
    ) -> Result:
        result = self.forward(
            *(q.main[None], k[None], v[None]),
            softmax_scale=scale,
            softcap=softcap or None,
            causal=causal,
            return_lse=True,
        )
        return result[0][0], result[1][0].T


@frozen
class FlashAttention2:
    """FlashAttention-2 (``flash_attn``). Its pages are multiples of 256 tokens.

    Attributes:
        with_cache: ``flash_attn_with_kvcache``.
        dense: ``flash_attn_func``.
    """

    name: str
    with_cache: Callable[..., Any]
    dense: Callable[..., Any]
    smallest_unit: int = 256

    def refusals(
        self, model: ModelShape, group: GroupShape, capability: Capability | None
    ) -> list[str]:
        reasons = []
        if capability is not None and capability[0] < 8:
            reasons.append(f"it is for capability 8.0 and above, got {shown(capability)}")
        if group.unit % self.smallest_unit:
            reasons.append(
                f"its pages are multiples of {self.smallest_unit} tokens, got {group.unit}"
            )
        if model.attention == "mla":
            return [*reasons, "it has no latent attention"]
        return reasons + head_refusals(model, 256)

    def attend(
        self,
        q: Query,
        k: Tensor,
        v: Tensor,
        table: Tensor,
        lengths: Tensor,
        scale: float,
        softcap: float,
        splits: int,
        zeros: Tensor,
        out: Tensor,
    ) -> Result:
        result = self.with_cache(
            *(q.main, by_pages(k), by_pages(v)),
            cache_seqlens=lengths,
            block_table=table,
            softmax_scale=scale,
            softcap=softcap,
            num_splits=splits,
            return_softmax_lse=True,
        )
        return result[0], result[1][:, :, 0]

    def chunk(
        self, q: Query, k: Tensor, v: Tensor, scale: float, softcap: float, causal: bool
    ) -> Result:
        result = self.dense(
            *(q.main[None], k[None], v[None]),
            softmax_scale=scale,
            softcap=softcap,
            causal=causal,
            return_attn_probs=True,
        )
        return result[0][0], result[1][0].T
