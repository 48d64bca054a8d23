"""A small DeepSeek-V3.2 model, and its decoder layers as each stage of the training runs them.

The layers here stand in for those of Transformers in ``causal_logits``: same weights and same
results, but dense attention runs without a mask, sparse attention in blocks of rows, and the
indexer gets a gradient, of its own loss alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from byte_tokenizer import PAD_ID
from dsa_index import BLOCK_ELEMENTS, IndexRows, index_loss, index_recall, selections
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

from topkv_transformers.indexer import project, rotate_halves, rotate_neighbours

RECALL_ROWS = 64


def dsa_config(max_length: int, topk: int, *, tiny: bool = False) -> DeepseekV32Config:
    """A byte-level DeepSeek-V3.2 of 5.4 million parameters; of some thousands if ``tiny``."""
    sizes = (
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"intermediate_size": 64, "q_lora_rank": 16, "kv_lora_rank": 16}
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
        | {"index_n_heads": 2, "index_head_dim": 16}
        if tiny
        else {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8}
        | {"intermediate_size": 768, "q_lora_rank": 128, "kv_lora_rank": 64}
        | {"qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
        | {"index_n_heads": 8, "index_head_dim": 64}
    )
    return DeepseekV32Config(
        **sizes,
        num_key_value_heads=sizes["num_attention_heads"],
        # Every layer has a dense MLP: there are no experts.
        first_k_dense_replace=sizes["num_hidden_layers"],
        mlp_layer_types=["dense"] * sizes["num_hidden_layers"],
        index_topk=topk,
        vocab_size=256,
        max_position_embeddings=max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=PAD_ID,
        attn_implementation="sdpa",
    )


def index_parameters(model: DeepseekV32ForCausalLM) -> list[nn.Parameter]:
    return [p for layer in model.model.layers for p in layer.self_attn.indexer.parameters()]


def other_parameters(model: DeepseekV32ForCausalLM) -> list[nn.Parameter]:
    """Return every parameter but those of the indexers."""
    index = {id(parameter) for parameter in index_parameters(model)}
    return [parameter for parameter in model.parameters() if id(parameter) not in index]


def set_learning(model: DeepseekV32ForCausalLM, *, index: bool, others: bool) -> None:
    """Set which of the two parts of a model the next stage changes."""
    for parameter in index_parameters(model):
        parameter.requires_grad_(index)
    for parameter in other_parameters(model):
        parameter.requires_grad_(others)


class Heads(NamedTuple):
    """Queries and keys [B, H, n, nope + rope], values [B, H, n, v], latents [B, n, q_rank]."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_resid: Tensor


def project_heads(attention: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Heads:
    """Expanded queries, keys and values of ``x`` [B, n, hidden]; cos and sin are [1, n, rope]."""
    batch, tokens, _ = x.shape
    cos, sin = (angles.expand(batch, -1, -1).flatten(0, 1) for angles in (cos, sin))
    nope, rope = attention.qk_nope_head_dim, attention.qk_rope_head_dim
    q_resid = attention.q_a_layernorm(attention.q_a_proj(x))
    q = attention.q_b_proj(q_resid).view(batch * tokens, -1, nope + rope)
    latent, k_rope = attention.kv_a_proj_with_mqa(x).split([attention.kv_lora_rank, rope], dim=-1)
    expanded = attention.kv_b_proj(attention.kv_a_layernorm(latent))
    k_nope, v = expanded.view(*q.shape[:2], -1).split([nope, attention.v_head_dim], dim=-1)
    k_rope = rotate_neighbours(k_rope.reshape(batch * tokens, 1, rope), cos, sin)
    q = torch.cat((q[..., :nope], rotate_neighbours(q[..., nope:], cos, sin)), dim=-1)
    k = torch.cat((k_nope, k_rope.expand(-1, q.shape[1], -1)), dim=-1)
    q, k, v = (t.view(batch, tokens, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
    return Heads(q, k, v, q_resid)


def project_index(indexer: Any, x: Tensor, q_resid: Tensor, cos: Tensor, sin: Tensor) -> IndexRows:
    """Run the indexer on detached inputs, in the dtype of its weights."""
    dtype = indexer.wk.weight.dtype
    cos, sin = (angles.expand(x.shape[0], -1, -1) for angles in (cos, sin))
    rows = (tensor.detach().flatten(0, 1).to(dtype) for tensor in (x, q_resid, cos, sin))
    with torch.autocast(x.device.type, enabled=False):
        index = project(indexer, rotate_halves, *rows)
    return IndexRows(
        *(t.view(*x.shape[:2], *t.shape[1:]) for t in (index.q, index.k, index.weights))
    )


def dense_attention(heads: Heads, scaling: float) -> Tensor:
    """Causal attention [B, H, n, v] over all tokens."""
    q, k, v, _ = heads
    # The flash kernel takes values as wide as keys only.
    wide = pad(v, (0, q.shape[-1] - v.shape[-1]))
    out = scaled_dot_product_attention(q, k, wide, is_causal=True, scale=scaling)
    return out[..., : v.shape[-1]]


def masked_attention(heads: Heads, masks: list[Tensor], scaling: float) -> Tensor:
    """Attention [B, H, n, v] over the tokens that the masks of the blocks of rows let through."""
    parts, start = [], 0
    for mask in masks:
        rows, end = mask.shape[-2:]
        k, v = heads.k[:, :, :end], heads.v[:, :, :end]
        q = heads.q[:, :, start : start + rows]
        # One mask for all heads: torch would write out an expanded one.
        mask = mask.unsqueeze(1)
        parts.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling))
        start += rows
    return torch.cat(parts, dim=2)


class DsaLayer(nn.Module):
    """A decoder layer of Transformers with another way to its attention.

    Args:
        layer: layer whose weights it uses.
        topk: tokens that a row attends to, chosen by the index; None for dense attention.
        learn: leave the indexer's loss in ``self.loss`` after each pass.
        measure: leave [2] of ``index_recall`` for this k in ``self.recall`` after each pass.
    """

    def __init__(
        self,
        layer: nn.Module,
        topk: int | None = None,
        *,
        learn: bool = False,
        measure: int | None = None,
        elements: int = BLOCK_ELEMENTS,
    ) -> None:
        super().__init__()
        self.layer: Any = layer
        self.topk, self.learn, self.measure, self.elements = topk, learn, measure, elements
        self.loss = self.recall = torch.zeros(())

    def forward(
        self, hidden: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> Tensor:
        """Map [B, n, hidden] to the same; ``position_embeddings`` are cos and sin [1, n, rope]."""
        attention = self.layer.self_attn
        x = self.layer.input_layernorm(hidden)
        heads = project_heads(attention, x, *position_embeddings)
        if self.topk is None and not self.learn and self.measure is None:
            out = dense_attention(heads, attention.scaling)
        else:
            index = project_index(attention.indexer, x, heads.q_resid, *position_embeddings)
            # Scores and targets in fp32: bf16 would tie tokens that the index ranks.
            with torch.autocast(hidden.device.type, enabled=False):
                out = self._attend(heads, index, attention.scaling)
        hidden = hidden + attention.o_proj(out.transpose(1, 2).flatten(2))
        result: Tensor = hidden + self.layer.mlp(self.layer.post_attention_layernorm(hidden))
        return result

    def _attend(self, heads: Heads, index: IndexRows, scaling: float) -> Tensor:
        masks: list[Tensor] = []
        if self.learn:
            self.loss, masks = index_loss(
                index, heads.q, heads.k, scaling, self.topk, self.elements
            )
        elif self.topk is not None:
            masks = selections(index, self.topk, self.elements)
        if self.measure is not None:
            tokens = heads.q.shape[2]
            # Rows of the second half: those before it have less than half of the tokens to miss.
            rows = torch.linspace(tokens // 2, tokens - 1, RECALL_ROWS, device=heads.q.device)
            self.recall = index_recall(index, heads.q, heads.k, scaling, self.measure, rows.long())
        if self.topk is None:
            return dense_attention(heads, scaling)
        return masked_attention(heads, masks, scaling)


def dsa_layers(
    model: DeepseekV32ForCausalLM, topk: int | None = None, **options: Any
) -> list[DsaLayer]:
    """Stand-ins for the layers of a model; ``options`` are those of ``DsaLayer``."""
    return [DsaLayer(layer, topk, **options) for layer in model.model.layers]


def mean_loss(layers: Sequence[DsaLayer]) -> Tensor:
    """The indexers' loss, mean over the layers."""
    return torch.stack([layer.loss for layer in layers]).mean()
