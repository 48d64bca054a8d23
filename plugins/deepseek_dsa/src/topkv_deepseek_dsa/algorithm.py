"""DeepSeek Sparse Attention: the model's own indexer says which tokens are worth attending.

DeepSeek-AI, "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models", 2025. The model
projects index queries, keys and weights and hands them down; this keeps the keys and selects.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topkv import hookimpl
from topkv.errors import ConfigError
from topkv.hooks.algorithm import AlgorithmSetup, AlgorithmSpec, RepresentationSpec
from topkv.ops.topk import topk
from topkv.types import LayerView, Selection
from topkv_authoring.index import OwnIndex
from topkv_authoring.sticky import prefer_resident
from topkv_deepseek_dsa import reference
from topkv_deepseek_dsa.entry import IndexerParams

MOST_HEADS, LEAST_DIM, MOST_DIM = 128, 16, 256


class DeepSeekDSA(OwnIndex):
    """Selects the tokens of the highest index score, one set for all heads of a row.

    ``score(t, s) = sum over the index heads j of w[t, j] * relu(q[t, j] . k[s])``, fp32. Weights
    carry every scale factor and may be negative. The newest token competes like any other.

    With fp8 keys, a key is 128 e4m3 codes and an fp32 scale, in blocks of 64 tokens as DeepGEMM
    and FlashMLA have them; queries are quantised per head, their scales go into the weights.
    Otherwise keys and queries are of the model's dtype. A stored key depends on its key alone. Of
    equal scores the lower token wins.

    Several queries of a row select together: a token is worth the largest of their scores. Their
    own tokens do not compete, as they are attended anyway.

    In steps a token that is on the device already is worth ``sticky`` more. Index scores are what
    the indexer's training puts into a softmax, so their unit is that of a natural logarithm.
    """

    score_bytes = 256 << 20

    def __init__(self, setup: AlgorithmSetup) -> None:
        """Raise ConfigError with every reason against the shape of the indexer."""
        super().__init__(setup)
        self.settings: IndexerParams = setup.params
        dim, page, reasons = self.dim, self.group.page_tokens, []
        if not 1 <= self.heads <= MOST_HEADS:
            reasons.append(f"from 1 to {MOST_HEADS} index heads are supported, got {self.heads}")
        if not LEAST_DIM <= dim <= MOST_DIM or dim & (dim - 1):
            reasons.append(
                f"the index head dim must be a power of two from {LEAST_DIM} to {MOST_DIM}, got "
                f"{dim}"
            )
        if self.settings.fp8 and page % reference.BLOCK:
            reasons.append(
                f"fp8 keys lie in blocks of {reference.BLOCK} tokens with their scales behind "
                f"them: page_tokens must be a multiple of {reference.BLOCK}, got {page}; change "
                "it, or set keys to 'bf16'"
            )
        if reasons:
            raise ConfigError("deepseek_dsa", reasons)

    @hookimpl
    def spec(self) -> AlgorithmSpec:
        dim = self.dim
        width, dtype = (dim + 4, torch.uint8) if self.settings.fp8 else (dim, self.model.dtype)
        # Nothing else holds the index keys.
        index = RepresentationSpec(
            "index", "token", (width,), dtype, derived=False, packed=self.settings.fp8
        )
        return AlgorithmSpec(representations=(index,))

    @hookimpl
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, weights: Tensor | None, out: Selection
    ) -> Selection:
        step, queries = layer.step, q.shape[1]
        q, weights = self._asked(q, weights, self.step_rows(layer, q))
        real = step.appended.clamp(min=1)
        counts = step.lengths if queries == 1 else (step.lengths - real).clamp(min=0)
        counts = counts * (step.slots >= 0)
        tokens = torch.arange(self.group.max_units, device=q.device).expand(step.batch, -1)
        # Behind the length stands no page: read page 0; top-k leaves its scores out.
        tokens = torch.where(tokens < counts[:, None], tokens, 0).repeat_interleave(queries, 0)
        slots = step.slots.clamp(min=0).repeat_interleave(queries)[:, None].expand_as(tokens)
        scores = self._score(layer, slots, tokens, q, weights)
        # The first query is real in any row; padding has any bits.
        padding = torch.arange(queries, device=q.device) >= real[:, None]
        scores = scores.unflatten(0, (-1, queries))
        scores = scores.masked_fill(padding[..., None], float("-inf")).amax(1)
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
        for at, counts in self.prompt_blocks(start, rows, self.heads, q.device):
            tokens = torch.arange(start + at.stop, device=q.device)
            slots = torch.full_like(tokens, slot)
            scores = self._score(layer, slots, tokens, q[at], weights[at])
            topk(scores, counts, ids[at, 0], impl="reference")

    def _asked(
        self, q: Tensor, weights: Tensor | None, rows: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Queries ``[n, H, D]`` of ``[*rows, H, D]``, and weights ``[n, H]`` of ``[*rows, H]``."""
        q = self.index_queries(q, rows)
        self.check("weights", weights, (*rows, self.heads))
        assert weights is not None
        return q, weights.flatten(0, -2)

    def write_index(self, layer: LayerView, slots: Tensor, tokens: Tensor, keys: Tensor) -> None:
        """Index keys ``[n, D]`` to the pool."""
        pool, settings = layer.pools["index"], self.settings
        at = self.token_rows(layer, slots, tokens)
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
        at = self.token_rows(layer, slots, tokens)
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
