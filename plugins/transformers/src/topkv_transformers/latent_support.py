"""Models with latent attention: which can be attached, their geometry, and the defaults of those
that select for themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from topkv.plugins import PluginRegistry
from topkv.types import IndexerShape, ModelShape
from topkv_transformers.advice import algorithm_of
from topkv_transformers.indexer import rotation_of
from topkv_transformers.latent import ROTARY, rotary_of

LAYER_TYPES = {"indexed_attention", "deepseek_sparse_attention"}
"""Names of these layers; the second up to Transformers 5.17."""

_SIZES = (
    *("num_heads", "q_lora_rank", "kv_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "scaling"),
)
_INDEX_SIZES = ("n_heads", "head_dim", "qk_rope_head_dim", "index_topk", "softmax_scale")


def geometry(module: nn.Module) -> tuple[Any, ...]:
    """Sizes that all attention layers must have in common."""
    return tuple(getattr(module, name, None) for name in _SIZES)


def layer_refusals(modules: list[Any], on_meta: bool = False) -> list[str]:
    """Reasons why attention modules cannot be replaced. The modules are on one device, with real
    weights, or else ``on_meta``, where none of them is run."""
    reasons = []
    if any(rotary_of(module) is None for module in modules):
        names = sorted({type(module).__qualname__ for module in modules})
        reasons.append(f"the forward of {', '.join(names)} calls none of {', '.join(ROTARY)}")
    if not all(_plain(module) for module in modules):
        reasons.append(
            "kv_b_proj is quantized or wrapped; expected a Linear without bias and in the dtype "
            "of the model, because its weight goes into queries and outputs: load the model "
            "dequantized"
        )
    if all(getattr(module, "indexer", None) is None for module in modules):
        return reasons
    return reasons + _indexer_refusals(modules, on_meta)


def _plain(module: Any) -> bool:
    """Return True if ``kv_b_proj`` is its weight and nothing else."""
    up, heads = module.kv_b_proj, module.num_heads
    rows = heads * (module.qk_nope_head_dim + module.v_head_dim)
    return (
        isinstance(up, nn.Linear)
        and up.bias is None
        and up.weight.shape == (rows, module.kv_lora_rank)
        and up.weight.dtype is module.kv_a_layernorm.weight.dtype
    )


def _indexer_refusals(modules: list[Any], on_meta: bool) -> list[str]:
    indexers = [module.indexer for module in modules]
    if any(getattr(module, "q_lora_rank", None) is None for module in modules):
        return ["an indexer of queries without a latent (q_lora_rank=None) is not supported"]
    if indexers[0] is None:
        return ["layer 0 has no indexer, and there is no layer before it to share with"]
    own = [indexer for indexer in indexers if indexer is not None]
    kinds = {(type(each), *(getattr(each, name, None) for name in _INDEX_SIZES)) for each in own}
    if len(kinds) > 1:
        return ["the indexers of the layers differ in class or size; expected alike"]
    if not on_meta and rotation_of(own[0]) is None:
        return [
            f"the RoPE of {type(own[0]).__qualname__} is neither of halves nor of neighbours: on "
            "a random input its keys are not those of either; its selection cannot be reproduced"
        ]
    return []


def latent_shape(modules: list[Any], dtype: torch.dtype) -> ModelShape:
    """Geometry of the attention layers of a model that was not refused."""
    first, indexer = modules[0], None
    indexers = [getattr(module, "indexer", None) for module in modules]
    own = tuple(layer for layer, each in enumerate(indexers) if each is not None)
    if own:
        layers = None if len(own) == len(modules) else own
        indexer = IndexerShape(indexers[0].n_heads, indexers[0].head_dim, layers)
    return ModelShape(
        num_layers=len(modules),
        num_heads=first.num_heads,
        num_kv_heads=1,
        head_dim=first.kv_lora_rank + first.qk_rope_head_dim,
        dtype=dtype,
        scale=first.scaling,
        attention="mla",
        value_dim=first.kv_lora_rank,
        indexer=indexer,
    )


def advice(config: Any, registry: PluginRegistry) -> Mapping[str, Any]:
    """Select what the model was trained to select: as many tokens, by its own indexer."""
    return {"budget": config.index_topk, **algorithm_of(registry, "mla")}
