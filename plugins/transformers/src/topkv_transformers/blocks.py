"""Models whose grouped-query layers select blocks by an index of their own: MiniMax-M3.

The index module of a layer hands the blocks that it selects to the attention function. Over a
``TopkvCache`` it hands over what it projects instead, and topkv selects.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from topkv.plugins import PluginRegistry
from topkv.types import IndexerShape
from topkv_transformers.advice import algorithm_of
from topkv_transformers.cache import TopkvCache

LAYER_TYPE = "minimax_m3_sparse"
"""Name of these layers."""

_SIZES = ("num_heads", "head_dim", "block_size", "topk_blocks", "local_blocks")


def project(module: Any, hidden: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Queries ``[B, H^I, q, D^I]`` and keys ``[B, 1, q, D^I]`` of an index module.

    Args:
        module: the index module.
        hidden: ``[B, q, hidden]`` what the attention layer is given.
        angles: cosines and sines ``[B, q, R]``.
    """
    dim, shape = module.head_dim, (*hidden.shape[:-1], -1, module.head_dim)
    q = module.q_norm(module.q_proj(hidden).view(shape)).transpose(1, 2)
    k = module.k_norm(module.k_proj(hidden).view(shape)).transpose(1, 2)
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    q, k = rotate(q, k, *(each[..., :dim] for each in angles))
    return q, k


class BlockIndex:
    """The ``forward`` of one index module while its model is attached.

    Args:
        module: the index module.
    """

    def __init__(self, module: Any) -> None:
        self.module, self.original = module, module.forward
        self._replaced = module.__dict__.get("forward")
        module.forward = self

    def remove(self) -> None:
        """Give the module its own ``forward`` back."""
        del self.module.__dict__["forward"]
        if self._replaced is not None:
            self.module.forward = self._replaced

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        cache: Any,
        position_ids: Tensor,
    ) -> Any:
        """Return ``project`` over a ``TopkvCache``, and over any other what the module selects."""
        if not isinstance(cache, TopkvCache):
            return self.original(hidden_states, position_embeddings, cache, position_ids)
        return project(self.module, hidden_states, position_embeddings)


def install(modules: list[Any]) -> list[BlockIndex]:
    """Replace the ``forward`` of the index modules of attention modules, which were checked."""
    return [BlockIndex(module.indexer) for module in modules if module.indexer is not None]


def layer_refusals(modules: list[Any], on_meta: bool = False) -> list[str]:
    """Reasons why attention modules cannot be served. The modules are on one device, with real
    weights, or else ``on_meta``, where none of them is run."""
    own = [module.indexer for module in modules if module.indexer is not None]
    if not own:
        return ["no layer has an index, and its class is known to have one: nothing selects"]
    kinds = {(type(each), *(getattr(each, name, None) for name in _SIZES)) for each in own}
    if len(kinds) > 1:
        return ["the indexes of the layers differ in class or size; expected alike"]
    if not on_meta and not _projects_alike(own[0]):
        return [
            f"the keys of {type(own[0]).__qualname__} on a random input are not those that topkv "
            "makes of its weights; its selection cannot be reproduced"
        ]
    return []


@torch.no_grad()
def _projects_alike(module: Any, rows: int = 8) -> bool:
    """Return True if ``project`` makes the keys that the module itself makes, of noise."""
    where = module.k_proj.weight
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((1, rows, where.shape[1]), generator=generator).to(where)
    angles = 3 * torch.randn((1, rows, module.head_dim // 2), generator=generator)
    angles = torch.cat((angles, angles), dim=-1)
    both = angles.cos().to(where), angles.sin().to(where)
    found: list[Tensor] = []
    layer = SimpleNamespace(update_index=lambda keys: found.append(keys) or keys)
    cache = SimpleNamespace(layers=[layer] * (module.layer_idx + 1))
    positions = torch.arange(rows, device=where.device)[None]
    module(hidden, both, cache, positions)
    keys, ours = found[0].float(), project(module, hidden, both)[1].float()
    band = 8 * torch.finfo(where.dtype).eps * keys.abs().max()
    return bool((ours - keys).abs().max() <= band)


def indexer_shape(modules: list[nn.Module]) -> IndexerShape:
    """Geometry of the index of attention modules that were not refused."""
    own = {n: module.indexer for n, module in enumerate(modules) if module.indexer is not None}
    first: Any = next(iter(own.values()))
    return IndexerShape(first.num_heads, first.head_dim, tuple(own))


def advice(config: Any, registry: PluginRegistry) -> Mapping[str, Any]:
    """Select what the model was trained to select, and nothing in layers without an index."""
    values: dict[str, Any] = {
        "unit": config.index_block_size,
        "budget": config.index_block_size * config.index_topk_blocks,
        "scope": "kv_head",
        "dense_layers": [n for n, kind in enumerate(config.layer_types) if kind != LAYER_TYPE],
        **algorithm_of(registry, "gqa"),
    }
    local = config.index_local_blocks
    return values if local == 1 else {**values, "params": {"local": local}}
