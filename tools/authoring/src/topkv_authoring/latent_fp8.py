"""The KV format ``fp8``: latent rows as bytes, alike on both tiers, and their encoding in torch.

It is the 656-byte row that FlashMLA reads (its "V32" format):

    512 latents as e4m3 | 4 scales, fp32, of 128 latents each | 64 rope elements, bfloat16

with scale ``2 ** ceil(log2(max(max |x| / 448, 1e-4)))``. ``latent_fp8_kernels`` writes the same
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from topkv import hookimpl
from topkv.errors import CONFIG_REFUSED, ConfigError
from topkv.hooks.kv_format import KVFormatSetup, TokenRow

LATENT, ROPE, TILE = 512, 64, 128
"""Elements of a latent row: latents, rope elements, and latents that share a scale."""

ROW_BYTES = LATENT + 4 * (LATENT // TILE) + 2 * ROPE
"""Bytes of a packed row."""

LEAST_SCALE, E4M3_MAX = 1e-4, 448.0


class LatentFp8:
    """Latent rows in ``ROW_BYTES`` bytes.

    Raises:
        ConfigError: the model has other rows.
    """

    def __init__(self, setup: KVFormatSetup) -> None:
        model = setup.model
        if (model.attention, model.head_dim, model.out_dim) != ("mla", LATENT + ROPE, LATENT):
            reason = (
                f"kv_format 'fp8' is for latent attention with rows of {LATENT} + {ROPE} "
                f"elements, got {model.attention} with head_dim {model.head_dim} and values of "
                f"{model.out_dim}; set kv_format to 'model'"
            )
            raise ConfigError(CONFIG_REFUSED, [reason])

    @hookimpl
    def row(self) -> TokenRow:
        return TokenRow(1, ROW_BYTES, torch.uint8)

    @hookimpl
    def pack(
        self, k: Tensor, v: Tensor, out: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        rows = encode_fp8(k, out[0] if out else None)
        return rows, rows

    @hookimpl
    def unpack(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rows = decode_fp8(k, dtype)
        return rows, rows[..., :LATENT]


class LatentFp8Kernels(LatentFp8):
    """Latent rows that a kernel packs to the same bytes."""

    @hookimpl
    def pack(
        self, k: Tensor, v: Tensor, out: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        from topkv_authoring import latent_fp8_kernels

        rows = out[0] if out else k.new_empty((*k.shape[:-1], ROW_BYTES), dtype=torch.uint8)
        latent_fp8_kernels.encode_fp8(k, rows, LATENT, TILE, ROPE)
        return rows, rows


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
