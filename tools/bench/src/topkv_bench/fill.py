"""Caches of random keys and values, filled without a prompt: decoding is all that is measured.

A long prompt takes minutes, and copying as many tokens takes no time. The cost of a step depends
on how much there is to attend to and on what changes, not on the values of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from topkv import SparseCoordinator
from topkv.errors import CapabilityError

CHUNK = 8192
"""Tokens that are written at a time; a multiple of every unit."""


def refuse_latent(attention: str) -> None:
    """Refuse latent rows, which a model makes together with what its indexer keeps.

    Raises:
        CapabilityError: the attention is not grouped-query attention.
    """
    if attention != "gqa":
        raise CapabilityError(
            "the cache cannot be filled with random rows",
            [f"expected grouped-query attention, got {attention!r}; use --fill prompt"],
        )


def fill_dynamic(cache: DynamicCache, model: PreTrainedModel, rows: int, context: int) -> None:
    """Give a cache of Transformers ``context`` random tokens in each row.

    Raises:
        CapabilityError: see ``refuse_latent`` and ``fill_layer``.
    """
    text = model.config.get_text_config()
    refuse_latent("mla" if getattr(text, "kv_lora_rank", None) else "gqa")
    for number, layer in enumerate(cache.layers):
        fill_layer(layer, partial(cache.update, layer_idx=number), model, rows, context)


def fill_layer(
    layer: Any, update: Callable[[Tensor, Tensor], Any], model: PreTrainedModel, rows: int, n: int
) -> None:
    """Give a layer of Transformers' own cache n random tokens; one that slides keeps its window.

    Args:
        layer: the layer, empty.
        update: function that appends keys and values ``[rows, Hkv, tokens, D]`` to it.

    Raises:
        CapabilityError: the layer keeps a state, which random keys would not make.
    """
    if not isinstance(layer, DynamicLayer):
        kind = type(layer).__name__
        raise CapabilityError(
            "the cache cannot be filled with random rows",
            [f"expected layers of keys and values, got {kind}; use --fill prompt"],
        )
    text = model.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    ends = [0, n]
    if isinstance(layer, DynamicSlidingWindowLayer):  # one token last: then it holds no chunk
        ends = [*range(0, n - 1, CHUNK), n - 1, n]
    for start, end in pairwise(ends):
        sizes = (rows, heads, end - start, dim)
        update(*(_random(sizes, model.dtype, model.device) for _ in range(2)))


def fill_coordinator(coordinator: SparseCoordinator, slot: int, context: int) -> None:
    """Give an empty request ``context`` random tokens, stored and represented as a prompt's are.

    Raises:
        CapabilityError: see ``refuse_latent``.
        HostMemoryError: pages are missing.
    """
    model, device = coordinator.model, coordinator.config.device
    refuse_latent(model.attention)
    for start in range(0, context, CHUNK):
        tokens = min(CHUNK, context - start)
        coordinator.forward_begin(prefill=[(slot, tokens)])
        forward = coordinator.forward
        assert forward is not None
        sizes, (chunk,) = (tokens, model.num_kv_heads, model.head_dim), forward.chunks
        queries = (tokens, model.num_heads, model.head_dim)
        lse = torch.zeros(queries[:2], device=device)
        for path in coordinator.layers:
            k, v = (_random(sizes, model.dtype, device) for _ in range(2))
            q = _random(queries, model.dtype, device)
            stored = path.format.pack(*path.host.round(k, v))
            coordinator.prefill.store(path, chunk, *stored)(q, lse, None)
            forward.attended.add(path.view.layer)  # written, and not attended
        coordinator.forward_end()


def _random(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(sizes, dtype=dtype, device=device)
