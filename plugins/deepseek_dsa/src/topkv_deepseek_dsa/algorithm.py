"""DeepSeek Sparse Attention: the model's own indexer says which tokens are worth attending.

DeepSeek-AI, "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models", 2025. The model
projects index queries, keys and weights and hands them down; this keeps the keys and selects.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from topkv import hookimpl
from topkv.hooks.algorithm import AlgorithmSetup, AlgorithmSpec, RepresentationSpec
from topkv.ops.topk import topk
from topkv.types import LayerView, Selection
from topkv_authoring.selectors import host_ids
from topkv_authoring.sticky import prefer_resident
from topkv_deepseek_dsa import reference
from topkv_deepseek_dsa.parameters import settings_of

SCORE_BYTES = 256 << 20
"""Most bytes of the scores of a block of prompt rows."""

PROMPT_ROWS = 512
"""Most rows of such a block, for which top-k has its scratch."""


def blocks(
    start: int, rows: int, heads: int, device: torch.device
) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of prompt rows whose scores find room.

    Args:
        start: position of the first row.
        rows: rows of the prompt chunk.
        heads: scores that are kept of a row and token.
        device: of the second result.

    Yields:
        The rows, counted from ``start``, and how many tokens each of them sees, int32 ``[m]``.
    """
    each = 4 * (start + rows) * heads
    most = max(1, min(SCORE_BYTES // max(each, 1), PROMPT_ROWS))
    for first in range(0, rows, most):
        at = slice(first, min(first + most, rows))
        yield at, torch.arange(start + at.start + 1, start + at.stop + 1, device=device).int()


class DeepSeekDSA:
    """Selects the tokens of the highest index score, one set for all heads of a row.

    ``score(t, s) = sum over the index heads j of w[t, j] * relu(q[t, j] . k[s])``, fp32. Weights
    carry every scale factor and may be negative. The newest token competes like any other.

    With fp8 keys, a key is 128 e4m3 codes and an fp32 scale, in blocks of 64 tokens as DeepGEMM
    and FlashMLA have them; queries are quantised per head, their scales go into the weights.
    Otherwise keys and queries are of the model's dtype. A stored key depends on its key alone. Of
    equal scores the lower token wins.

    In steps a token that is on the device already is worth ``sticky`` more. Index scores are what
    the indexer's training puts into a softmax, so their unit is that of a natural logarithm.
    """

    def __init__(self, setup: AlgorithmSetup) -> None:
        self.model, self.group = setup.model, setup.group
        self.settings = settings_of(setup.model, setup.group, setup.params)

    @hookimpl
    def spec(self) -> AlgorithmSpec:
        dim = self.settings.dim
        width, dtype = (dim + 4, torch.uint8) if self.settings.fp8 else (dim, self.model.dtype)
        # Nothing else holds the index keys.
        index = RepresentationSpec(
            "index", "token", (width,), dtype, derived=False, packed=self.settings.fp8
        )
        return AlgorithmSpec(representations=(index,))

    @hookimpl
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        k = self._keys(k, k.shape[0])
        tokens = start + torch.arange(k.shape[0], device=k.device)
        self._write(layer, torch.full_like(tokens, slot), tokens, k)

    @hookimpl
    def update(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        k = k[:, 0]
        step = layer.step
        k = self._keys(k, step.batch)
        rows = (step.slots >= 0) & (step.lengths > 0) & (step.appended != 0)
        self._write(layer, step.slots[rows], step.lengths[rows] - 1, k[rows])

    @hookimpl
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, weights: Tensor | None, out: Selection
    ) -> Selection:
        step = layer.step
        q, weights = self._asked(q, weights, (step.batch, 1))
        counts = step.lengths * (step.slots >= 0)
        tokens = torch.arange(self.group.max_units, device=q.device).expand(step.batch, -1)
        # Behind the length stands no page: read page 0; top-k leaves its scores out.
        tokens = torch.where(tokens < counts[:, None], tokens, 0)
        slots = step.slots.clamp(min=0)[:, None].expand_as(tokens)
        scores = self._score(layer, slots, tokens, q, weights)
        prefer_resident(layer, scores, counts, self.settings.sticky, impl="reference")
        topk(scores, counts, out.ids, impl="reference")
        return out

    @hookimpl
    def retrieve_prompt(
        self,
        layer: LayerView,
        slot: int,
        start: int,
        q: Tensor,
        weights: Tensor | None,
        ids: Tensor,
    ) -> None:
        rows = q.shape[0]
        q, weights = self._asked(q, weights, (rows,))
        # The products of every head are kept.
        for at, counts in blocks(start, rows, self.settings.heads, q.device):
            tokens = torch.arange(start + at.stop, device=q.device)
            slots = torch.full_like(tokens, slot)
            scores = self._score(layer, slots, tokens, q[at], weights[at])
            topk(scores, counts, ids[at, 0], impl="reference")

    def _check(self, name: str, x: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(x.shape) != shape:
            raise ValueError(
                f"deepseek_dsa: expected {name} of the indexer {list(shape)}, got {list(x.shape)}"
            )

    def _keys(self, k: Tensor, rows: int) -> Tensor:
        """Keys ``[n, D]`` of ``[n, 1, D]``."""
        self._check("k", k, (rows, 1, self.settings.dim))
        return k[:, 0]

    def _asked(
        self, q: Tensor, weights: Tensor | None, rows: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Queries ``[n, H, D]`` of ``[*rows, H, D]``, and weights ``[n, H]`` of ``[*rows, H]``."""
        self._check("q", q, (*rows, self.settings.heads, self.settings.dim))
        if weights is None:
            raise ValueError(
                "deepseek_dsa: expected the weights of the model's indexer, got None; the engine "
                "has to hand down q, k and weights of every layer"
            )
        self._check("weights", weights, (*rows, self.settings.heads))
        return q.flatten(0, -3), weights.flatten(0, -2)

    def _write(self, layer: LayerView, slots: Tensor, tokens: Tensor, keys: Tensor) -> None:
        """Index keys ``[n, D]`` to the pool."""
        pool, settings = layer.pools["index"], self.settings
        at = host_ids(layer, slots, tokens)
        if settings.hadamard:
            keys = reference.hadamard(keys)
        if settings.fp8:
            codes, scales = reference.blocks(pool)
            place = (at // reference.BLOCK, at % reference.BLOCK)
            codes[place], scales[place] = reference.quantize(keys, settings.power_of_two)
        else:
            pool[at] = keys.to(pool.dtype)

    def _score(
        self, layer: LayerView, slots: Tensor, tokens: Tensor, q: Tensor, weights: Tensor
    ) -> Tensor:
        """The reference's scores, fp32 ``[m, n]``.

        Args:
            slots, tokens: ``[n]``, or ``[m, n]`` where every row has tokens of its own.
            q: ``[m, H, D]``.
            weights: ``[m, H]``.
        """
        pool, settings = layer.pools["index"], self.settings
        at = host_ids(layer, slots, tokens)
        weights = weights.float()
        if settings.hadamard:
            q = reference.hadamard(q)
        if not settings.fp8:
            return reference.scores(q.to(pool.dtype).float(), pool[at].float(), weights)
        codes, scales = reference.blocks(pool)
        place = (at // reference.BLOCK, at % reference.BLOCK)
        q_codes, q_scale = reference.quantize(q, settings.power_of_two)
        keys = reference.decode(codes[place])
        # The scale of a key is positive, and commutes with the relu.
        return reference.scores(reference.decode(q_codes), keys, weights * q_scale) * scales[place]
