"""The KV format ``model``: keys and values, or latent rows, as the model makes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from topkv.hooks.kv_format import KVFormatSetup, TokenRow
from topkv.plugins.discovery import hookimpl


class AsMade:
    """Keys and values in two planes, or latent rows in one."""

    def __init__(self, setup: KVFormatSetup) -> None:
        self.model = setup.model
        self.latent = setup.model.attention == "mla"

    @hookimpl
    def row(self) -> TokenRow:
        return TokenRow(1 if self.latent else 2, self.model.head_dim, self.model.dtype)

    @hookimpl
    def pack(
        self, k: Tensor, v: Tensor, out: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        return k, k if self.latent else v

    @hookimpl
    def unpack(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return k, k[..., : self.model.out_dim] if self.latent else v
