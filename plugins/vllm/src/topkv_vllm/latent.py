"""Latent attention (MLA) through the coordinator, and the indexer of the models that have one.

The core keeps one row a token, ``[latent | rope]``, and attends in the latent space, prompts too:
the key part of ``kv_b_proj`` goes into the query, its value part is applied to what comes back
(DeepSeek-V2, section 2.1.2). vLLM's layer projects, norms and rotates; what follows stands here.
Of an indexer (DeepSeek-V3.2, section 2.1) the projections are taken, and neither its keys, which
the algorithm keeps, nor its top-k.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from topkv.types import Index, IndexerShape
from topkv_vllm.backend import TopkvBackend, TopkvImpl


class LatentImpl(TopkvImpl):
    """One layer of latent attention.

    Args:
        kv_lora_rank: elements of a latent.
        indexer: of the layer; None where it has none, or uses that of the layer before it.
        more: as of ``TopkvImpl``.
        mla: what vLLM's layer applies itself.

    Attributes:
        index: what the indexer has projected for the rows of the open forward.
    """

    is_sparse = True
    supports_dense_mha_prefill = False  # or vLLM would make a backend for prompts
    dcp_world_size = 1
    index: Index | None = None

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        *,
        kv_lora_rank: int,
        indexer: Any = None,
        **mla: Any,
    ) -> None:
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
        )
        self.value_dim, self.indexer = kv_lora_rank, indexer

    def record_logical_topk_ready(self) -> None:
        """Do nothing: vLLM says that a selection is in its buffer; here none is."""


class LatentBackend(TopkvBackend):
    """Answers to the questions of vLLM before it makes layers of latent attention."""

    @staticmethod
    def get_impl_cls() -> type[LatentImpl]:
        """See ``AttentionBackend``."""
        return LatentImpl

    @classmethod
    def is_mla(cls) -> bool:
        """See ``AttentionBackend``."""
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        """See ``AttentionBackend``."""
        return True

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return the placeholder, the same for all layers, with an indexer or without: they share
        one group."""
        return replace(super().customize_spec(spec), is_index_group_leader=False)


def without_index_caches(layers: dict[str, Any]) -> None:
    """Take the caches of index keys away, in which vLLM would keep what the algorithm keeps.

    Args:
        layers: of vLLM that keep state or look themselves up by name.
    """
    for name, layer in [*layers.items()]:
        if isinstance(layer, AttentionLayerBase) and not hasattr(layer, "impl"):
            del layers[name]


def attend_here(layer: Any) -> None:
    """Let a layer of vLLM's, whose weights are loaded, attend here."""
    if hasattr(layer, "o_proj"):  # the model's whole layer, as vLLM has it on a GPU
        layer.forward = partial(_attend_whole, layer)
        return
    layer.forward = partial(_attend, layer)
    if layer.impl.indexer is not None:
        layer.impl.indexer.forward = partial(_project, layer.impl)


def indexer_shape(impls: list[Any]) -> IndexerShape | None:
    """Geometry of the indexers of a model; None where it has none."""
    own = tuple(number for number, impl in enumerate(impls) if impl.indexer is not None)
    if not own:
        return None
    first = impls[own[0]].indexer
    return IndexerShape(first.n_head, first.head_dim, None if len(own) == len(impls) else own)


def _project(impl: LatentImpl, hidden: Tensor, qr: Tensor, positions: Tensor, rotary: Any) -> None:
    """Run the ``forward`` of an indexer.

    Args:
        impl: of its layer, which gets the index.
        hidden: ``[tokens, hidden]`` what the attention layer is given.
        qr: ``[tokens, q_lora_rank]`` its normed query latents.
        positions: ``[tokens]``.
        rotary: RoPE of the indexer.
    """
    indexer = impl.indexer
    heads, size, turned = indexer.n_head, indexer.head_dim, indexer.rope_dim
    q = indexer.wq_b(qr)[0].view(-1, heads, size)
    k, weights = indexer.wk_weights_proj(hidden)[0].split([size, heads], dim=-1)
    k = indexer.k_norm(k)
    q_rope, k_rope = rotary(
        positions, q[..., :turned].contiguous(), k[:, None, :turned].contiguous()
    )
    q = torch.cat([q_rope.view(-1, heads, turned), q[..., turned:]], dim=-1)
    k = torch.cat([k_rope.view(-1, turned), k[:, turned:]], dim=-1)
    impl.index = Index(q, k, weights.float() * (heads**-0.5 * indexer.softmax_scale))


def _attend_whole(layer: Any, positions: Tensor, hidden_states: Tensor) -> Tensor:
    """Run the ``forward`` of a layer of latent attention with its projections.

    Args:
        layer: vLLM's ``DeepseekV32Attention``.
        positions: ``[tokens]``.
        hidden_states: ``[tokens, hidden]``.

    Returns:
        ``[tokens, hidden]``, of the heads of this rank.
    """
    sizes = [layer.q_lora_rank, layer.kv_lora_rank, layer.qk_rope_head_dim]
    qr, latent, k_rope = layer.fused_qkv_a_proj(hidden_states)[0].split(sizes, dim=-1)
    qr, latent = layer.q_a_layernorm(qr), layer.kv_a_layernorm(latent)
    q = layer.q_b_proj(qr)[0].view(-1, layer.num_heads, layer.qk_head_dim)
    turned = q[..., layer.qk_nope_head_dim :]
    q[..., layer.qk_nope_head_dim :], k_rope = layer.rotary_emb(positions, turned, k_rope[:, None])
    if layer.impl.indexer is not None:
        _project(layer.impl, hidden_states, qr, positions, layer.indexer_rope_emb)
    return layer.o_proj(_attend(layer, q, latent, k_rope))[0]  # type: ignore[no-any-return]


def _attend(
    layer: Any,
    q: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    output_shape: torch.Size | None = None,
    **_: Any,
) -> Tensor:
    """Run the ``forward`` of a layer of latent attention.

    Args:
        layer: vLLM's ``MLAAttention``.
        q: ``[tokens, H, nope + rope]`` after RoPE.
        latent: ``[tokens, latent]``, normed.
        k_rope: ``[tokens, 1, rope]`` after RoPE.

    Returns:
        ``[tokens, H * v]``; 0 behind the rows of requests.
    """
    impl: LatentImpl = layer.impl
    metadata = get_forward_context().attn_metadata
    rows = metadata[layer.layer_name].rows if isinstance(metadata, dict) else 0
    out = q.new_zeros((len(q), layer.num_heads, layer.v_head_dim))
    if rows and impl.session:
        q_nope, q_rope = q[:rows].split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], dim=-1)
        q_latent = torch.matmul(q_nope.transpose(0, 1), layer.W_UK_T).transpose(0, 1)
        queries = torch.cat([q_latent, q_rope], dim=-1)
        row = torch.cat([latent[:rows, None], k_rope[:rows]], dim=-1)
        index = impl.index.rows(slice(0, rows)) if impl.index is not None else None
        found = impl.session.attend(impl.number, queries, row, row, index=index)
        torch.matmul(found.transpose(0, 1), layer.W_UV, out=out[:rows].transpose(0, 1))
    impl.index = None
    return out.flatten(1)
