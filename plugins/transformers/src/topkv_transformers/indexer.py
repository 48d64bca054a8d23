"""Projections of the indexer of a DSA model: queries, keys and weights, without its top-k.

DeepSeek-AI, "DeepSeek-V3.2", 2025, section 2.1, as Transformers' ``DeepseekV32Indexer`` has it:
LayerNorm on keys, RoPE on the first dims of queries and keys, neither Hadamard transform nor fp8.
V3.2 rotates halves of these dims there and GLM neighbours, whatever their main attention does, so
a module is asked which of the two it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from topkv.types import Index
from topkv_transformers.names import CACHE

Rotation = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(x [rows, heads, R], cos [rows, R], sin [rows, R]) -> [rows, heads, R]``; cos and sin hold the
R / 2 angles of a row twice, one behind the other."""


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of the pairs ``(i, i + R / 2)``."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def rotate_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of the pairs ``(2 i, 2 i + 1)``; the first elements of all pairs, then the second."""
    cos, sin = (angles.chunk(2, dim=-1)[0].unsqueeze(1) for angles in (cos, sin))
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def project(
    indexer: Any, rotate: Rotation, x: Tensor, q_resid: Tensor, cos: Tensor, sin: Tensor
) -> Index:
    """The index of rows.

    Args:
        indexer: the indexer module of a layer.
        rotate: its kind of RoPE.
        x: ``[rows, hidden]`` what the attention layer is given.
        q_resid: ``[rows, q_lora_rank]`` its normed query latents.
        cos, sin: ``[rows, R]``.
    """
    q = indexer.wq_b(q_resid).view(-1, indexer.n_heads, indexer.head_dim)
    k = indexer.k_norm(indexer.wk(x)).unsqueeze(1)
    sizes = [indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim]
    q, k = (
        torch.cat((rotate(turned, cos, sin), rest), dim=-1)
        for turned, rest in (tensor.split(sizes, dim=-1) for tensor in (q, k))
    )
    # Some checkpoints keep this projection in fp32.
    weights = indexer.weights_proj(x.to(indexer.weights_proj.weight.dtype)).float()
    scale = indexer.n_heads**-0.5 * indexer.softmax_scale
    return Index(q, k.squeeze(1), weights * scale)


class _Capture:
    """The part of a cache that an indexer calls; keeps the keys."""

    keys: Tensor

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        self.keys = keys
        return keys


@torch.no_grad()
def rotation_of(indexer: nn.Module, rows: int = 8) -> Rotation | None:
    """Find the RoPE of a module: run it on noise and compare its keys. None if neither fits."""
    module: Any = indexer
    where = module.wk.weight
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(where)

    x, q_resid = noise(rows, module.hidden_size), noise(rows, module.q_lora_rank)
    angles = 3 * torch.randn((rows, module.qk_rope_head_dim // 2), generator=generator)
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos().to(where), angles.sin().to(where)
    capture = _Capture()
    positions = torch.arange(rows, device=where.device)[None]
    mask = torch.ones((1, rows, rows), dtype=torch.bool, device=where.device)
    batch = (tensor[None] for tensor in (x, q_resid))
    module(*batch, (cos[None], sin[None]), mask, positions, **{CACHE: capture})
    keys = capture.keys.reshape(rows, -1).float()
    band = 8 * torch.finfo(where.dtype).eps * keys.abs().max()
    for rotate in (rotate_halves, rotate_neighbours):
        ours = project(module, rotate, x, q_resid, cos, sin).k.float()
        if (ours - keys).abs().max() <= band:
            return rotate
    return None
