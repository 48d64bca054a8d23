"""Geometry and configuration of topkv from SGLang's arguments, its model and its layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from attrs import evolve

from topkv import SparseConfig
from topkv.config import LoweredConfig, lower
from topkv.config.settings import DEFAULTS
from topkv.errors import CapabilityError
from topkv.plugins import registry
from topkv.types import IndexerShape, ModelShape
from topkv_engines.memory import check_device, with_prompt_buffer
from topkv_sglang.drafts import drafts_of
from topkv_sglang.latent import indexer_of_config

REFUSED = "SGLang cannot serve this through topkv"


def shape_of_config(model: Any, ranks: int = 1) -> ModelShape:
    """Shape of a model's attention layers on one of its tensor parallel ranks, by SGLang's
    ``ModelConfig``, before any layer is there."""
    if model.attention_arch.name == "MLA":
        return ModelShape(
            num_layers=model.num_hidden_layers,
            num_heads=model.num_attention_heads // ranks,
            num_kv_heads=1,
            head_dim=model.kv_lora_rank + model.qk_rope_head_dim,
            dtype=model.dtype,
            scale=model.scaling,
            attention="mla",
            value_dim=model.kv_lora_rank,
            indexer=indexer_of_config(model),
        )
    return ModelShape(
        num_layers=model.num_hidden_layers,
        num_heads=model.num_attention_heads // ranks,
        num_kv_heads=model.get_num_kv_heads(ranks),
        head_dim=model.head_dim,
        dtype=model.dtype,
        scale=model.head_dim**-0.5,
    )


def shape_of_layers(
    layers: Iterable[Any], dtype: torch.dtype, indexer: IndexerShape | None = None
) -> ModelShape:
    """Shape of a model by its attention layers.

    Args:
        layers: SGLang's ``RadixAttention``, in any order.
        dtype: of keys and values.
        indexer: of the model, if its layers are of latent attention.

    Raises:
        CapabilityError: a layer attends in a way that topkv does not know, or they are not alike,
            or not numbered from 0; with every reason.
    """
    layers = sorted(layers, key=lambda layer: layer.layer_id)
    latent = indexer is not None
    reasons = [reason for layer in layers for reason in _layer_reasons(layer, latent)]
    kinds = {
        (
            *(each.tp_q_head_num, each.tp_k_head_num, each.qk_head_dim, each.v_head_dim),
            float(each.scaling),
        )
        for each in layers
    }
    if len(kinds) != 1:
        shown = ", ".join(map(str, sorted(kinds))) or "none"
        reasons.append(
            "expected layers alike in heads, kv-heads, sizes of keys and values, and scale, got "
            f"{shown}"
        )
    numbers = [layer.layer_id for layer in layers]
    if numbers != [*range(len(layers))]:
        reasons.append(f"expected a layer for each number from 0 on, got {numbers}")
    if reasons:
        raise CapabilityError(REFUSED, reasons)
    (heads, kv_heads, size, value_size, scale) = kinds.pop()
    shape = ModelShape(len(layers), heads, kv_heads, size, dtype, scale)
    if not latent:
        return shape
    return evolve(shape, attention="mla", value_dim=value_size, indexer=indexer)


def _layer_reasons(layer: Any, latent: bool) -> list[str]:
    window = layer.sliding_window_size
    refused = {
        f"a sliding window of {window} tokens": window not in (None, -1),
        f"a softcap of {layer.logit_cap}": layer.logit_cap,
        f"attention of type {layer.attn_type}": getattr(layer.attn_type, "value", layer.attn_type)
        != "decoder",
        "cross-attention": layer.is_cross_attention,
        "chunks (iRoPE)": layer.use_irope,
        "a temperature by position": layer.xai_temperature_len > 0,
        f"positions of kind {layer.pos_encoding_mode}": layer.pos_encoding_mode != "NONE",
        "values of another size than keys": not latent and layer.v_head_dim != layer.qk_head_dim,
        "scales of a quantized cache": layer.k_scale is not None,
    }
    return [
        f"layer {layer.layer_id} has {what}, which is not supported"
        for what, is_so in refused.items()
        if is_so
    ]


def lowered_for(
    arguments: Any, model: Any, settings: SparseConfig, shape: ModelShape
) -> LoweredConfig:
    """The complete configuration: the user's, with what SGLang decides.

    Args:
        arguments: SGLang's, once they are resolved.
        model: SGLang's ``ModelConfig``.
        settings: the user's.
        shape: of the model.

    Raises:
        ConfigError: with every reason.
    """
    queries = drafts_of(arguments)
    settings = evolve(
        settings,
        pages="engine",
        page_tokens=arguments.page_size,
        max_requests=arguments.max_running_requests or DEFAULTS["max_requests"],
        max_request_tokens=model.context_len + queries - 1,
        max_queries=queries,
    )
    return lower(
        settings,
        shape,
        device=torch.device(arguments.device),
        registry=registry(),
        checkpoint=getattr(model.hf_config, "topkv", None),
        max_positions=model.context_len + queries - 1,
    )


def fitting(lowered: LoweredConfig, arguments: Any, room: int) -> LoweredConfig:
    """Return the configuration with a prompt buffer in what its device buffers leave.

    Args:
        lowered: configuration of the coordinator.
        arguments: SGLang's, once they are resolved.
        room: bytes of the device that SGLang's own pool would have.

    Raises:
        DeviceMemoryError: the device buffers do not fit, with how many requests would.
    """
    check_device(lowered, room, "max_running_requests", "mem_fraction_static")
    chunked = 0 < (arguments.chunked_prefill_size or 0) < lowered.max_request_tokens
    if chunked and lowered.prefill_buffer_tokens is None:
        return with_prompt_buffer(lowered, room)
    return lowered


def pool_tokens(lowered: LoweredConfig, most: int | None) -> int:
    """Return the tokens of SGLang's pool: those of the host pool without page 0, or fewer.

    Args:
        lowered: configuration of the coordinator.
        most: SGLang's ``max_total_tokens``; whole pages of it.
    """
    pages = lowered.num_pages - 1
    if most is not None:
        pages = min(pages, most // lowered.page_tokens)
    return pages * lowered.page_tokens
