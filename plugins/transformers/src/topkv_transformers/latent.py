"""Latent attention over topkv, of models that bring an indexer and of those that do not.

The core keeps one row a token, ``[latent | rope]``, and attends in the latent space: the key part
of ``kv_b_proj`` goes into the query, its value part is applied to what comes back (DeepSeek-V2,
section 2.1.2). This stands in for the module's ``forward``, because that one scores and attends to
everything that its cache returns, and releases differ in what they cache.
"""

from __future__ import annotations

import inspect
import sys
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from topkv_transformers.attention import without_backward
from topkv_transformers.cache import TopkvCache
from topkv_transformers.forwards import Forward
from topkv_transformers.indexer import project, rotation_of
from topkv_transformers.names import cache_in

HALVES = "apply_rotary_pos_emb"
ROTARY = (f"{HALVES}_interleave", HALVES, "apply_rotary_emb")
"""RoPE functions of Transformers: of neighbours, of halves, of neighbours by complex angles."""

GROWING = "get_llama_4_attn_scale"
"""A factor of queries that grows with their position."""


def _called(module: nn.Module, names: tuple[str, ...]) -> dict[str, Any]:
    """Functions of the given names, in the module class's file, that its ``forward`` calls."""
    kind = type(module)
    known = inspect.unwrap(kind.forward).__code__.co_names
    file = vars(sys.modules[kind.__module__])
    return {name: file[name] for name in names if name in known and name in file}


def rotary_of(module: Any) -> Any:
    """The RoPE function that a module takes; None if it is none that is known."""
    called = _called(module, ROTARY)
    if len(called) > 1:  # then its configuration says which, and to it alone
        return called[ROTARY[0 if module.config.rope_interleave else 1]]
    return next(iter(called.values()), None)


class LatentAttention:
    """The ``forward`` of one attention module while its model is attached.

    Over a ``TopkvCache`` it goes through the coordinator; over any other it is the module's own.

    Args:
        module: the attention module.
        layer: its number.
        rotation: RoPE of the model's indexers; None where it has none.
    """

    def __init__(self, module: Any, layer: int, rotation: Any) -> None:
        self.module, self.layer, self.rotation = module, layer, rotation
        self.rotary = rotary_of(module)
        self.growing = _called(module, (GROWING,)).get(GROWING)
        self.original = module.forward
        self._replaced = module.__dict__.get("forward")
        # GLM's layers hand their selection on, and expect a third result for it.
        shares = "prev_topk_indices" in inspect.signature(self.original).parameters
        self._further = (None, None) if shares else (None,)
        module.forward = self

    def remove(self) -> None:
        """Give the module its own ``forward`` back."""
        del self.module.__dict__["forward"]
        if self._replaced is not None:
            self.module.forward = self._replaced

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | Tensor,
        attention_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor | None, ...]:
        """See the module's ``forward``: ``[B, q, hidden]``, and None for all else.

        Angles are cosines and sines, or one complex tensor.
        """
        cache = cache_in(kwargs)
        if not isinstance(cache, TopkvCache):
            result: tuple[Tensor | None, ...] = self.original(
                hidden_states=hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                position_ids=position_ids,
                **kwargs,
            )
            return result
        forward = cache.requests.opened(cache.state)
        angles = position_embeddings
        angles = (angles,) if isinstance(angles, Tensor) else angles
        out = self._attend(forward, hidden_states, angles, position_ids)
        out = without_backward(out, chain((hidden_states,), self.module.parameters()))
        return out, *self._further

    @torch.no_grad()
    def _attend(
        self,
        forward: Forward,
        hidden: Tensor,
        angles: tuple[Tensor, ...],
        positions: Tensor | None,
    ) -> Tensor:
        module, batch = self.module, hidden.shape[0]
        x = forward.pack(hidden)
        angles = tuple(forward.pack(each.expand(batch, -1, -1)) for each in angles)
        latent = getattr(module, "q_lora_rank", None) is not None
        q = module.q_a_layernorm(module.q_a_proj(x)) if latent else module.q_proj(x)
        index = None
        if getattr(module, "indexer", None) is not None:
            index = project(module.indexer, self.rotation, x, q, *angles)
        q = module.q_b_proj(q) if latent else q
        if self.growing is not None:
            q = q * self._growth(forward, positions, batch).to(q.dtype)
        keys, values = self._expansions()
        queries, rows = self._queries_and_rows(x, q, angles, keys)
        out = forward.attend(self.layer, queries, rows, rows, index)
        out = torch.matmul(out.transpose(0, 1), values.transpose(1, 2))
        return forward.unpack(module.o_proj(out.transpose(0, 1).flatten(1)), batch)

    def _growth(self, forward: Forward, positions: Tensor, batch: int) -> Tensor:
        """The factor of the queries of each row, ``[rows, 1]``."""
        rope = self.module.config.rope_parameters
        names = ("llama_4_scaling_beta", "original_max_position_embeddings")
        factors = self.growing(positions, *map(rope.get, names))[:, 0]  # [B or 1, q, 1]
        return forward.pack(factors.expand(batch, -1, -1))

    def _expansions(self) -> tuple[Tensor, Tensor]:
        """Weights of a latent's keys ``[H, nope, latent]`` and values ``[H, v, latent]``."""
        module = self.module
        sizes = [module.qk_nope_head_dim, module.v_head_dim]
        weight = module.kv_b_proj.weight.view(module.num_heads, sum(sizes), module.kv_lora_rank)
        keys, values = weight.split(sizes, dim=1)
        return keys, values

    def _queries_and_rows(
        self, x: Tensor, q: Tensor, angles: tuple[Tensor, ...], keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Absorbed queries ``[rows, H, latent + rope]`` and new rows ``[rows, 1, latent + rope]``.

        Args:
            x: ``[rows, hidden]``.
            q: ``[rows, H * (nope + rope)]`` before RoPE.
            angles: cosines and sines ``[rows, rope]``, or complex ``[rows, rope / 2]``.
            keys: ``[H, nope, latent]``.
        """
        module = self.module
        q = q.view(len(x), module.num_heads, module.qk_head_dim)
        q_nope, q_rope = q.split([module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
        latent, k_rope = module.kv_a_proj_with_mqa(x).split(
            [module.kv_lora_rank, module.qk_rope_head_dim], dim=-1
        )
        latent = module.kv_a_layernorm(latent).unsqueeze(1)
        # The module's function wants [B, heads, rows, rope].
        q_rope, k_rope = self.rotary(
            q_rope.transpose(0, 1)[None], k_rope[None, None], *(each[None] for each in angles)
        )
        q_latent = torch.matmul(q_nope.transpose(0, 1), keys)
        queries = torch.cat((q_latent, q_rope[0]), dim=-1).transpose(0, 1)
        return queries.contiguous(), torch.cat((latent, k_rope[0].transpose(0, 1)), dim=-1)


def install(modules: list[Any]) -> list[LatentAttention]:
    """Replace the ``forward`` of the attention modules of a model, which has been checked."""
    indexer = getattr(modules[0], "indexer", None)
    rotation = None if indexer is None else rotation_of(indexer)
    return [LatentAttention(module, layer, rotation) for layer, module in enumerate(modules)]
