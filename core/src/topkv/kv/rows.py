"""How the keys and values of a token become the rows that both tiers store.

Keys and values of grouped-query attention are stored as they are. Latent rows are stored in the
model's dtype, or as ``fp8``, the 656-byte row that FlashMLA reads (its "V32" format):

    512 latents as e4m3 | 4 scales, fp32, of 128 latents each | 64 rope elements, bfloat16

with scale ``2 ** ceil(log2(max(max |x| / 448, 1e-4)))``. A row is encoded once, when its token is
appended; everything that attends, prompts included, sees what was stored.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from topkv.types import ModelShape

KV_FORMATS = ("model", "fp8")

LATENT, ROPE, TILE = 512, 64, 128
ROW = LATENT + 4 * (LATENT // TILE) + 2 * ROPE
"""Bytes of an fp8 row."""

E4M3_MAX, LEAST_SCALE = 448.0, 1e-4


@frozen
class RowFormat:
    """What a group stores of a token and kv-head.

    Attributes:
        name: of ``KV_FORMATS``.
        planes: 2, keys and values, or 1.
        dim: elements of a stored row.
        dtype: of a stored row.
        value_dim: elements of a value.
        impl: ``"reference"`` or ``"triton"``.
    """

    name: str
    planes: int
    dim: int
    dtype: torch.dtype
    value_dim: int
    impl: str = "reference"

    def encode(self, k: Tensor, v: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What ``append`` and ``store_chunk`` of a transfer take.

        Args:
            k, v: ``[n, Hkv, D]``; ``v`` is not read where there is one plane.
            out: ``[n, Hkv, dim]`` for packed rows; made if None.
        """
        if self.planes == 2:
            return k, v
        if self.name == "fp8":
            out = k.new_empty((*k.shape[:-1], ROW), dtype=torch.uint8) if out is None else out
            if self.impl == "triton":
                from topkv.kv import row_kernels

                row_kernels.encode_fp8(k, out, LATENT, TILE, ROPE)
            else:
                encode_fp8(k, out)
            k = out
        return k, k

    def decode(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values ``[n, Hkv, D]`` of what ``fetch`` gave."""
        if self.planes == 2:
            return k, v
        if self.name == "fp8":
            k = decode_fp8(k, dtype)
        return k, k[..., : self.value_dim]


def row_format(model: ModelShape, name: str, impl: str = "reference") -> RowFormat:
    """The format of a model's rows; ``fp8`` is for latent rows of 512 + 64 elements alone."""
    if name == "fp8":
        return RowFormat(name, 1, ROW, torch.uint8, LATENT, impl)
    planes = 1 if model.attention == "mla" else 2
    return RowFormat(name, planes, model.head_dim, model.dtype, model.out_dim, impl)


def format_reasons(model: ModelShape, name: str) -> list[str]:
    """Why a model's rows cannot be stored so."""
    if name != "fp8" or (model.attention, model.head_dim, model.out_dim) == (
        *("mla", LATENT + ROPE, LATENT),
    ):
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
    """Rows ``[..., 576]`` as uint8 ``[..., 656]``.

    Args:
        out: where to write; made if None.
    """
    shape = (*rows.shape[:-1], ROW)
    out = torch.empty(shape, dtype=torch.uint8, device=rows.device) if out is None else out
    latent, rope = rows[..., :LATENT].float(), rows[..., LATENT:]
    scale = scales(latent)
    codes = latent.unflatten(-1, (-1, TILE)) / scale.unsqueeze(-1)
    codes = codes.clamp(-E4M3_MAX, E4M3_MAX).flatten(-2).to(torch.float8_e4m3fn)
    out[..., :LATENT] = codes.view(torch.uint8)
    out[..., LATENT : ROW - 2 * ROPE] = scale.view(torch.uint8)
    out[..., ROW - 2 * ROPE :] = rope.to(torch.bfloat16).contiguous().view(torch.uint8)
    return out


def decode_fp8(rows: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """uint8 ``[..., 656]`` as rows ``[..., 576]``."""
    codes = rows[..., :LATENT].contiguous().view(torch.float8_e4m3fn).float()
    scale = rows[..., LATENT : ROW - 2 * ROPE].contiguous().view(torch.float32)
    latent = codes.unflatten(-1, (-1, TILE)) * scale.unsqueeze(-1)
    rope = rows[..., ROW - 2 * ROPE :].contiguous().view(torch.bfloat16)
    return torch.cat([latent.flatten(-2).to(dtype), rope.to(dtype)], dim=-1)
