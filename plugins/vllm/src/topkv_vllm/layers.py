"""The attention layers that vLLM has made, and their geometry."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index

from topkv.errors import CapabilityError
from topkv.types import ModelShape
from topkv_vllm.backend import TopkvImpl
from topkv_vllm.latent import LatentImpl, indexer_shape


def attention_layers(vllm_config: Any, expected: int, alone: bool) -> list[Any]:
    """The attention layers of a loaded model that are topkv's, in order.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        expected: how many there are.
        alone: whether the model has no others.

    Raises:
        CapabilityError: layers are missing, or others are there.
    """
    named = vllm_config.compilation_config.static_forward_context
    layers = {name: each for name, each in named.items() if isinstance(each, AttentionLayerBase)}
    impls = {name: getattr(layer, "impl", layer) for name, layer in layers.items()}
    own = [name for name, impl in impls.items() if isinstance(impl, TopkvImpl)]
    others = sorted({type(impls[name]).__name__ for name in impls if name not in own})
    if len(own) != expected or (others and alone):
        raise CapabilityError(
            "vLLM cannot serve this through topkv",
            [
                f"expected {expected} layers of {TopkvImpl.__name__}, got {len(own)} and "
                f"{others or 'no others'}"
            ],
        )
    return [layers[name] for name in sorted(own, key=extract_layer_index)]


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
    if isinstance(impls[0], LatentImpl):
        latent: dict[str, Any] = {"attention": "mla", "value_dim": impls[0].value_dim}
        latent["indexer"] = indexer_shape(impls)
        return ModelShape(len(impls), heads, 1, size, dtype, scale, **latent)
    return ModelShape(len(impls), heads, kv_heads, size, dtype, scale)
