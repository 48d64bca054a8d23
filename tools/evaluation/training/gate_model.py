"""A small MiniMax-M3 without experts, before and after it has block indexes, and their loss.

The index of a layer learns which blocks the attention of its frozen model falls on. That is the
warm-up of DeepSeek-V3.2's indexer (its report of 2025, section 2.1.1) with blocks in the place of
tokens and each kv-head for itself; MiniMax has not said how it trained its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import MiniMaxM3VLForCausalLM
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import apply_rotary_pos_emb

from topkv_transformers.blocks import LAYER_TYPE, project

FULL = "full_attention"
INDEX_DIM = 32
DENSE_LAYERS = 1
"""Layers at the front without an index; MiniMax-M3 has three of sixty."""


def gate_config(sizes: dict[str, int], positions: int) -> MiniMaxM3VLTextConfig:
    """Return settings of a model of 256 bytes that attends to everything, without an index.

    As in MiniMax-M3, half of the channels of a head are rotated, and MLPs are clamped SwiGLU.

    Args:
        sizes: sizes of a shape of ``train_mixture.SHAPES``.
        positions: tokens that it is made for.
    """
    half = sizes["head_dim"] // 2
    return MiniMaxM3VLTextConfig(
        **sizes,
        dense_intermediate_size=sizes["intermediate_size"],
        mlp_layer_types=["dense"] * sizes["num_hidden_layers"],
        layer_types=[FULL] * sizes["num_hidden_layers"],
        index_n_heads=sizes["num_key_value_heads"],
        index_head_dim=min(INDEX_DIM, half),
        rotary_dim=half,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 500000.0,
            "partial_rotary_factor": 0.5,
        },
        vocab_size=256,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        attn_implementation="sdpa",
    )


def with_index(model: MiniMaxM3VLForCausalLM, block: int, blocks: int) -> MiniMaxM3VLForCausalLM:
    """Add an untrained index to each layer but the first; only the indexes may learn.

    Args:
        block: tokens of a block.
        blocks: blocks that a row attends to in each kv-head.
    """
    layers = model.config.num_hidden_layers
    config = type(model.config).from_dict(
        model.config.to_dict()
        | {"index_block_size": block, "index_topk_blocks": blocks}
        | {"layer_types": [FULL] * DENSE_LAYERS + [LAYER_TYPE] * (layers - DENSE_LAYERS)}
    )
    gated = MiniMaxM3VLForCausalLM(config).to(model.device)
    found = gated.load_state_dict(model.state_dict(), strict=False)
    strange = [name for name in found.missing_keys if ".indexer." not in name]
    if strange or found.unexpected_keys:
        raise ValueError(f"weights of another model: {strange + found.unexpected_keys}")
    for name, parameter in gated.named_parameters():
        parameter.requires_grad_(".indexer." in name)
    return gated


def projected(attention: Any, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Queries ``[B, H, n, D]``, keys and values ``[B, Hkv, n, D]`` of an attention module."""
    shape = (*x.shape[:-1], -1, attention.head_dim)
    q = attention.q_norm(attention.q_proj(x).view(shape)).transpose(1, 2)
    k = attention.k_norm(attention.k_proj(x).view(shape)).transpose(1, 2)
    v = attention.v_proj(x).view(shape).transpose(1, 2)
    q, k = apply_rotary_pos_emb(q, k, *angles)
    return q, k, v


def block_mass(q: Tensor, k: Tensor, rows: Tensor, scaling: float, block: int) -> Tensor:
    """Return rows' attention on each block, fp32 ``[B, Hkv, R, U]``, mean of a kv-head's queries.

    Args:
        q, k: ``[B, H, n, D]`` and ``[B, Hkv, n, D]``; ``n`` is a multiple of ``block``.
        rows: ``[R]``, positions.
    """
    grouped = q[:, :, rows].float().unflatten(1, (k.shape[1], -1))
    products = grouped @ k.float()[:, :, None].mT * scaling
    later = torch.arange(k.shape[2], device=k.device) > rows[:, None]
    mass = products.masked_fill(later, float("-inf")).softmax(-1).mean(2)
    return mass.unflatten(-1, (-1, block)).sum(-1)


def block_scores(q: Tensor, k: Tensor, rows: Tensor, block: int) -> Tensor:
    """Return the best product of rows of ``q`` with each block's keys, fp32 ``[B, H, R, U]``."""
    products = q[:, :, rows].float() @ k.float().mT
    later = torch.arange(k.shape[2], device=k.device) > rows[:, None]
    return products.masked_fill(later, float("-inf")).unflatten(-1, (-1, block)).amax(-1)


def gate_loss(mass: Tensor, scores: Tensor, rows: Tensor, block: int) -> Tensor:
    """Return the mean over rows of KL(attention || softmax of scores) times the mass, in nats.

    Attention and scores are of the blocks before the row's own, which is always attended: a row
    that finds all it needs there teaches nothing. Rows have a block before them.
    """
    own = torch.arange(mass.shape[-1], device=mass.device) >= (rows // block)[:, None]
    mass = mass.masked_fill(own, 0.0)
    shares = scores.masked_fill(own, float("-inf")).log_softmax(-1).masked_fill(own, 0.0)
    wanted = torch.special.xlogy(mass, mass / mass.sum(-1, keepdim=True).clamp_min(1e-20))
    return (wanted - mass * shares).sum(-1).mean()


def mass_held(mass: Tensor, scores: Tensor, rows: Tensor, block: int, blocks: int) -> Tensor:
    """Return mean mass of the blocks that scores select, and of the best, fp32 ``[2]``; the row's
    own block is among both."""
    own = torch.arange(mass.shape[-1], device=mass.device) == (rows // block)[:, None]
    most = min(blocks, mass.shape[-1])
    held = [
        mass.gather(-1, each.masked_fill(own, float("inf")).topk(most, dim=-1).indices)
        for each in (scores, mass)
    ]
    return torch.stack([each.sum(-1).mean() for each in held])


class GateLayer(nn.Module):
    """A decoder layer that attends to everything, and leaves ``[3]`` in ``self.report``: loss,
    mass of the blocks of its index, and mass of the best blocks. The loss has a gradient.

    Args:
        layer: layer of Transformers, whose weights it uses.
        rows: rows to look at in the next call, ``[R]``.
    """

    def __init__(self, layer: nn.Module, rows: Tensor) -> None:
        super().__init__()
        self.layer: Any = layer
        self.rows = rows
        self.report: Tensor | None = None

    def forward(
        self, hidden: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> Tensor:
        """Map ``[B, n, hidden]`` to the same; ``position_embeddings``: cos, sin ``[1, n, d]``."""
        attention = self.layer.self_attn
        with torch.no_grad():
            x = self.layer.input_layernorm(hidden)
            q, k, v = projected(attention, x, position_embeddings)
            out = scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=attention.scaling, enable_gqa=True
            )
            hidden = hidden + attention.o_proj(out.transpose(1, 2).flatten(2))
            hidden = hidden + self.layer.mlp(self.layer.post_attention_layernorm(hidden))
        if attention.indexer is not None:
            self.report = self._learn(attention, x, position_embeddings, q, k)
        return hidden

    def _learn(
        self, attention: Any, x: Tensor, angles: tuple[Tensor, Tensor], q: Tensor, k: Tensor
    ) -> Tensor:
        index, rows = attention.indexer, self.rows
        # fp32: bf16 would tie blocks that the index ranks.
        with torch.autocast(x.device.type, enabled=False):
            index_q, index_k = project(index, x.float(), tuple(each.float() for each in angles))
            mass = block_mass(q, k, rows, attention.scaling, index.block_size)
            scores = block_scores(index_q, index_k, rows, index.block_size)
            loss = gate_loss(mass, scores, rows, index.block_size)
            held = mass_held(mass, scores, rows, index.block_size, index.topk_blocks)
        return torch.cat([loss[None], held.detach()])
