"""From vLLM's configuration and layers to the geometry and configuration of topkv."""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index

from topkv import SparseConfig
from topkv.config import LoweredConfig, lower
from topkv.errors import CapabilityError
from topkv.plugins import registry
from topkv.types import ModelShape
from topkv_vllm.backend import TopkvImpl


def shape_of_config(vllm_config: Any) -> ModelShape:
    """What the configuration of a model says of its attention layers, before any is there."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return ModelShape(
        num_layers=model.get_num_layers(parallel),
        num_heads=model.get_num_attention_heads(parallel),
        num_kv_heads=model.get_num_kv_heads(parallel),
        head_dim=model.get_head_size(),
        dtype=model.dtype,
        scale=model.get_head_size() ** -0.5,
    )


def attention_layers(vllm_config: Any) -> list[Any]:
    """The attention layers of a loaded model, in order.

    Raises:
        CapabilityError: some are not of this package, or layers are missing.
    """
    named = vllm_config.compilation_config.static_forward_context
    layers = {
        extract_layer_index(name): layer
        for name, layer in named.items()
        if isinstance(layer, AttentionLayerBase)
    }
    impls = [getattr(layer, "impl", layer) for layer in layers.values()]
    others = sorted({type(impl).__name__ for impl in impls if not isinstance(impl, TopkvImpl)})
    if others or sorted(layers) != [*range(len(layers))]:
        raise CapabilityError(
            "vLLM cannot serve this through topkv",
            [
                f"expected layers 0 to {len(layers) - 1} of {TopkvImpl.__name__}, got layers "
                f"{sorted(layers)} and {others or 'no others'}"
            ],
        )
    return [layers[number] for number in range(len(layers))]


def shape_of_layers(impls: list[Any], dtype: torch.dtype) -> ModelShape:
    """Geometry of a model by its attention layers.

    Args:
        impls: ``TopkvImpl`` of each, in order.
        dtype: of keys and values.

    Raises:
        CapabilityError: they are not alike, or there is none.
    """
    kinds = {(impl.num_heads, impl.num_kv_heads, impl.head_size, impl.scale) for impl in impls}
    if len(kinds) != 1:
        shown = ", ".join(map(str, sorted(kinds))) or "none"
        raise CapabilityError(
            "vLLM cannot serve this through topkv",
            [f"expected layers alike in heads, kv-heads, head size and scale, got {shown}"],
        )
    (heads, kv_heads, size, scale) = kinds.pop()
    return ModelShape(len(impls), heads, kv_heads, size, dtype, scale)


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
    )
    return lower(
        settings,
        shape,
        device=torch.device(vllm_config.device_config.device_type),
        registry=registry(),
        checkpoint=getattr(vllm_config.model_config.hf_config, "topkv", None),
        max_positions=longest,
    )
