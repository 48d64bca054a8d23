"""Hook specs of a KV format: the stored form of a token's keys and values, alike on both tiers.

``factory(setup)`` gives one for a configuration when it is lowered, with a ``KVFormatSetup``; it
allocates nothing. The setting ``kv_format`` names it, and backends state the formats that they
read (``Capabilities.kv_formats``). A token is packed once, when it is appended or its chunk
arrives; whatever attends, prompts included, sees what was stored. Bytes that are all 0xFF unpack
to NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor

from topkv.plugins.discovery import hookspec
from topkv.types import ModelShape


@frozen
class KVFormatSetup:
    """The argument of the factory of a KV format.

    Attributes:
        model: geometry of the attention layers.
    """

    model: ModelShape


@frozen
class TokenRow:
    """The stored form of one token of one kv-head.

    Attributes:
        planes: 2, keys and values, or 1.
        dim: elements of a token in each plane.
        dtype: of the elements; uint8 where they are packed.
    """

    planes: int
    dim: int
    dtype: torch.dtype


class KVFormat(Protocol):
    """The stored form of keys and values of a model."""

    @hookspec
    def row(self) -> TokenRow:
        """Return what is stored of a token."""

    @hookspec
    def pack(
        self, k: Tensor, v: Tensor, out: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Pack n tokens for ``append`` and ``store_chunk`` of a transfer engine. Hot.

        Args:
            k, v: ``[n, Hkv, D]`` in the model's dtype; ``v`` is not read where there is one plane.
            out: one of ``[n, Hkv, dim]`` that packed tokens are written to; made if None.

        Returns:
            Two tensors ``[n, Hkv, dim]`` of the row's dtype: ``k`` and ``v`` themselves where they
            are stored as they are, and twice the same where there is one plane.
        """

    @hookspec
    def unpack(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Unpack n stored tokens, as ``fetch`` of a transfer engine returns them.

        Args:
            k, v: ``[n, Hkv, dim]``.
            dtype: of the result where tokens are packed; otherwise it is theirs.

        Returns:
            Keys ``[n, Hkv, D]``, and values.
        """
