"""Geometry and configuration of topkv from vLLM's configuration."""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve

from topkv import SparseConfig
from topkv.config import LoweredConfig, lower
from topkv.plugins import registry
from topkv.types import IndexerShape, ModelShape
from topkv_vllm.args import EIGHT_BITS

WINDOW = "sliding_attention"
"""Name that models have for a layer that attends to a window."""

DRAFTERS = ("draft_model", "eagle", "eagle3", "mtp")
"""Methods of speculative decoding whose drafter has layers of its own."""


def shape_of_config(vllm_config: Any) -> ModelShape:
    """Shape of a model's attention layers by its configuration, before any layer is there."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model.use_mla:
        return _latent_shape_of_config(model, parallel)
    return ModelShape(
        num_layers=model.get_num_layers(parallel) - layer_types(model).count(WINDOW),
        num_heads=model.get_num_attention_heads(parallel),
        num_kv_heads=model.get_num_kv_heads(parallel),
        head_dim=model.get_head_size(),
        dtype=model.dtype,
        scale=model.get_head_size() ** -0.5,
    )


def _latent_shape_of_config(model: Any, parallel: Any) -> ModelShape:
    text = model.hf_text_config
    return ModelShape(
        num_layers=model.get_num_layers(parallel),
        num_heads=model.get_num_attention_heads(parallel),
        num_kv_heads=1,
        head_dim=text.kv_lora_rank + text.qk_rope_head_dim,
        dtype=model.dtype,
        scale=(text.qk_nope_head_dim + text.qk_rope_head_dim) ** -0.5,
        attention="mla",
        value_dim=text.kv_lora_rank,
        indexer=IndexerShape(text.index_n_heads, text.index_head_dim),
    )


def layer_types(model: Any) -> list[str]:
    """Kinds of the layers of a model; [] where it does not say."""
    return [*(getattr(model.hf_text_config, "layer_types", None) or ())]


def has_other_layers(vllm_config: Any) -> bool:
    """Return True if layers are not topkv's: those with windows, or those of a drafter."""
    drafter = vllm_config.speculative_config
    drafts = drafter is not None and drafter.method in DRAFTERS
    return drafts or WINDOW in layer_types(vllm_config.model_config)


def drafts_of(vllm_config: Any) -> int:
    """Tokens that vLLM drafts for each request of a step; 0 without speculative decoding."""
    speculative = vllm_config.speculative_config
    return int(speculative.num_speculative_tokens) if speculative else 0


def host_format_of(vllm_config: Any) -> dict[str, str]:
    """The setting that a ``kv_cache_dtype`` of vLLM becomes; none where it says nothing."""
    return {"host_format": "fp8"} if vllm_config.cache_config.cache_dtype in EIGHT_BITS else {}


def lowered_for(vllm_config: Any, settings: SparseConfig, shape: ModelShape) -> LoweredConfig:
    """The complete configuration: the user's, with what vLLM decides.

    Raises:
        ConfigError: with every reason.
    """
    longest = vllm_config.model_config.max_model_len
    settings = evolve(
        settings,
        pages="engine",
        page_tokens=vllm_config.cache_config.block_size,
        max_requests=vllm_config.scheduler_config.max_num_seqs,
        max_request_tokens=longest,
        max_queries=1 + drafts_of(vllm_config),
        **host_format_of(vllm_config),
    )
    return lower(
        settings,
        shape,
        device=torch.device(vllm_config.device_config.device_type),
        registry=registry(),
        checkpoint=getattr(vllm_config.model_config.hf_config, "topkv", None),
        max_positions=longest,
    )
