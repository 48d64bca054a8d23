"""The stored form of a token's keys and values, alike on both tiers, and its encoding.

Keys and values of grouped-query attention are stored as they come, rounded to what their host
format holds (``topkv.hooks.host_format``). Latent rows are stored in the model's dtype, or as
``fp8``, the 656-byte row that FlashMLA reads (its "V32" format):

    512 latents as e4m3 | 4 scales, fp32, of 128 latents each | 64 rope elements, bfloat16

with scale ``2 ** ceil(log2(max(max |x| / 448, 1e-4)))``. A row is encoded once, when its token is
appended; everything that attends, prompts included, sees what was stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from topkv.types import ModelShape

KV_FORMATS = ("model", "fp8")

LATENT, ROPE, TILE = 512, 64, 128
"""Elements of a latent row: latents, rope elements, and latents that share a scale."""

ROW_BYTES = LATENT + 4 * (LATENT // TILE) + 2 * ROPE
"""Bytes of a latent row as fp8."""

LEAST_SCALE, E4M3_MAX = 1e-4, 448.0


@frozen
class TokenFormat:
    """The stored form of one token of one kv-head.

    Attributes:
        name: of ``KV_FORMATS``.
        planes: 2, keys and values, or 1.
        dim: stored elements of a token in each plane: D, or bytes where they are packed.
        dtype: of the stored elements: that of the model, or uint8 where they are packed.
        value_dim: elements of a value, decoded.
        impl: ``"reference"`` or ``"triton"``, which packs with a kernel.
    """

    name: str
    planes: int
    dim: int
    dtype: torch.dtype
    value_dim: int
    impl: str = "reference"

    @classmethod
    def of(cls, model: ModelShape, name: str, impl: str = "reference") -> TokenFormat:
        """The format ``name`` for a model that ``format_reasons`` does not refuse."""
        if name == "fp8":
            return cls(name, 1, ROW_BYTES, torch.uint8, LATENT, impl)
        planes = 1 if model.attention == "mla" else 2
        return cls(name, planes, model.head_dim, model.dtype, model.out_dim, impl)

    def encode(
        self, k: Tensor, v: Tensor, out: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Encode n tokens' keys and values for ``append`` and ``store_chunk`` of a transfer.

        Args:
            k, v: ``[n, Hkv, D]`` in the model's dtype; ``v`` is not read where there is one plane.
            out: one of ``[n, Hkv, dim]`` that packed tokens are written to; made if None.

        Returns:
            Two tensors ``[n, Hkv, dim]`` of ``dtype``: ``k`` and ``v`` themselves where they are
            stored as they are, and twice the same where there is one plane.
        """
        if self.planes == 2:
            return k, v
        if self.name == "fp8":
            shape = (*k.shape[:-1], ROW_BYTES)
            packed = out[0] if out else k.new_empty(shape, dtype=torch.uint8)
            if self.impl == "triton":
                from topkv.kv import fp8_kernels

                fp8_kernels.encode_fp8(k, packed, LATENT, TILE, ROPE)
            else:
                encode_fp8(k, packed)
            k = packed
        return k, k

    def decode(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Decode stored tokens, as ``fetch`` of a transfer returns them, to keys and values.

        Args:
            k, v: ``[n, Hkv, dim]``, as stored.
            dtype: dtype of the result where tokens are packed; otherwise it is that of ``k`` and
                ``v``.

        Returns:
            Keys ``[n, Hkv, D]``, and values.
        """
        if self.planes == 2:
            return k, v
        if self.name == "fp8":
            k = decode_fp8(k, dtype)
        return k, k[..., : self.value_dim]


def format_reasons(model: ModelShape, name: str) -> list[str]:
    """Return reasons, if any, why a model's tokens cannot be stored in the format ``name``."""
    latent = model.attention == "mla" and model.head_dim == LATENT + ROPE
    if name != "fp8" or (latent and model.out_dim == LATENT):
        return []
    return [
        f"kv_format 'fp8' is for latent attention with rows of {LATENT} + {ROPE} elements, got "
        f"{model.attention} with head_dim {model.head_dim} and values of {model.out_dim}; "
        "set kv_format to 'model'"
    ]


def scales(latent: Tensor) -> Tensor:
    """Scales ``[..., 4]`` of latents ``[..., 512]``: powers of two, fp32."""
    amax = latent.float().unflatten(-1, (-1, TILE)).abs().amax(-1)
    # Exactly 2 ** ceil(log2(x)): mantissa and exponent, no logarithm that could round.
    mantissa, exponent = torch.frexp((amax / E4M3_MAX).clamp(min=LEAST_SCALE))
    exponent = exponent - (mantissa == 0.5).int()
    return torch.ldexp(torch.ones_like(mantissa), exponent)


def encode_fp8(rows: Tensor, out: Tensor | None = None) -> Tensor:
    """Encode rows ``[..., 576]`` as uint8 ``[..., 656]``.

    Args:
        out: where to write; made if None.
    """
    shape = (*rows.shape[:-1], ROW_BYTES)
    out = torch.empty(shape, dtype=torch.uint8, device=rows.device) if out is None else out
    latent, rope = rows[..., :LATENT].float(), rows[..., LATENT:]
    scale = scales(latent)
    codes = latent.unflatten(-1, (-1, TILE)) / scale.unsqueeze(-1)
    codes = codes.clamp(-E4M3_MAX, E4M3_MAX).flatten(-2).to(torch.float8_e4m3fn)
    out[..., :LATENT] = codes.view(torch.uint8)
    out[..., LATENT : ROW_BYTES - 2 * ROPE] = scale.view(torch.uint8)
    out[..., ROW_BYTES - 2 * ROPE :] = rope.to(torch.bfloat16).contiguous().view(torch.uint8)
    return out


def decode_fp8(rows: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Decode uint8 ``[..., 656]`` to rows ``[..., 576]``."""
    codes = rows[..., :LATENT].contiguous().view(torch.float8_e4m3fn).float()
    scale = rows[..., LATENT : ROW_BYTES - 2 * ROPE].contiguous().view(torch.float32)
    latent = codes.unflatten(-1, (-1, TILE)) * scale.unsqueeze(-1)
    rope = rows[..., ROW_BYTES - 2 * ROPE :].contiguous().view(torch.bfloat16)
    return torch.cat([latent.flatten(-2).to(dtype), rope.to(dtype)], dim=-1)
