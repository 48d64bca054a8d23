"""DeepSeek Sparse Attention: the model's own indexer says which tokens are worth attending.

DeepSeek-AI, "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models", 2025. The model
projects index queries, keys and weights and hands them down; this keeps the keys and selects.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from topkv import hookimpl
from topkv.ops.topk import topk
from topkv.types import AlgorithmSpec, GroupShape, LayerView, ModelShape, RepresentationSpec
from topkv_deepseek_dsa import reference
from topkv_deepseek_dsa.parameters import settings_of

WORKSPACE = 256 << 20
"""Most bytes of the scores of a block of prompt rows."""


class DeepSeekDSA:
    """Selects the tokens of the highest index score, one set for all heads of a row.

    ``score(t, s) = sum over the index heads j of w[t, j] * relu(q[t, j] . k[s])``, fp32. Weights
    carry every scale factor and may be negative. The newest token competes like any other.

    With fp8 keys, a key is 128 e4m3 codes and an fp32 scale, in blocks of 64 tokens as DeepGEMM
    and FlashMLA have them; queries are quantised per head, their scales go into the weights.
    Otherwise keys and queries are of the model's dtype. A stored key depends on its key alone. Of
    equal scores the lower token wins.
    """

    def __init__(
        self,
        model: ModelShape,
        group: GroupShape,
        params: dict[str, Any],
        impl: str,
        device: torch.device,
    ) -> None:
        self.model, self.group = model, group
        self.settings = settings_of(model, group, params, impl)
        self.launcher = None
        if impl == "triton":
            from topkv_deepseek_dsa.launch import Launcher

            self.launcher = Launcher(model, group, self.settings, device)

    @hookimpl
    def spec(self) -> AlgorithmSpec:
        dim = self.settings.dim
        if self.settings.fp8:
            index = RepresentationSpec("index", "token", (dim + 4,), torch.uint8)
        else:
            index = RepresentationSpec("index", "token", (dim,), self.model.dtype)
        return AlgorithmSpec(representations=(index,), tail="selectable")

    @hookimpl
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        self._check("k", k, (k.shape[0], 1, self.settings.dim))
        if k.shape[0] == 0:
            return
        if self.launcher is not None:
            self.launcher.construct(layer, slot, start, k[:, 0])
            return
        tokens = start + torch.arange(k.shape[0], device=k.device)
        self._write(layer, torch.full_like(tokens, slot), tokens, k[:, 0])

    @hookimpl
    def settle(
        self, layer: LayerView, slot: int, since: int, length: int, history: object
    ) -> None:
        """Nothing: the keys are complete at every moment."""

    @hookimpl
    def update(self, layer: LayerView, k: Tensor) -> None:
        step = layer.step
        self._check("k", k, (step.batch, 1, self.settings.dim))
        if self.launcher is not None:
            self.launcher.update(layer, k[:, 0])
            return
        rows = (step.slots >= 0) & (step.lengths > 0) & (step.appended != 0)
        self._write(layer, step.slots[rows], step.lengths[rows] - 1, k[rows, 0])

    @hookimpl
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, native: Tensor | None, ids: Tensor
    ) -> None:
        step, settings = layer.step, self.settings
        self._check("q", q, (step.batch, 1, settings.heads, settings.dim))
        weights = self._weights(native, step.batch)
        if self.launcher is not None:
            scores, counts = self.launcher.score(layer, q[:, 0], weights)
            topk(scores, counts, ids, impl="triton", work=self.launcher.work)
            return
        counts = step.lengths * (step.slots >= 0)
        tokens = torch.arange(self.group.max_units, device=q.device).expand(step.batch, -1)
        # Behind the length stands no page: read page 0; top-k leaves its scores out.
        tokens = torch.where(tokens < counts[:, None], tokens, 0)
        slots = step.slots.clamp(min=0)[:, None].expand_as(tokens)
        scores = self._score(layer, slots, tokens, q[:, 0], weights)
        topk(scores, counts, ids, impl="reference")

    @hookimpl
    def retrieve_prompt(
        self,
        layer: LayerView,
        slot: int,
        start: int,
        q: Tensor,
        native: Tensor | None,
        ids: Tensor,
    ) -> None:
        settings, rows = self.settings, q.shape[0]
        self._check("q", q, (rows, settings.heads, settings.dim))
        weights = self._weights(native, rows)
        # The reference keeps the products of every head.
        each = 4 * (start + rows) * (1 if self.launcher is not None else settings.heads)
        block = max(1, WORKSPACE // max(each, 1))
        for first in range(0, rows, block):
            at = slice(first, min(first + block, rows))
            counts = torch.arange(start + at.start + 1, start + at.stop + 1, device=q.device).int()
            if self.launcher is not None:
                scores = self.launcher.prompt(
                    layer, slot, start + at.stop, counts, q[at], weights[at]
                )
                self.launcher.best(scores, counts, ids[at])
                continue
            tokens = torch.arange(start + at.stop, device=q.device)
            slots = torch.full_like(tokens, slot)
            scores = self._score(layer, slots, tokens, q[at], weights[at])
            topk(scores, counts, ids[at], impl="reference")

    def _check(self, name: str, x: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(x.shape) != shape:
            raise ValueError(
                f"deepseek_dsa: expected {name} of the indexer {list(shape)}, got {list(x.shape)}"
            )

    def _weights(self, native: Tensor | None, rows: int) -> Tensor:
        if native is None:
            raise ValueError(
                "deepseek_dsa: expected the weights of the model's indexer, got None; the engine "
                "has to hand down q, k and weights of every layer"
            )
        self._check("weights", native, (rows, self.settings.heads))
        return native

    def _write(self, layer: LayerView, slots: Tensor, tokens: Tensor, keys: Tensor) -> None:
        """Index keys ``[n, D]`` to the pool."""
        pool, settings = layer.pools["index"], self.settings
        at = reference.host_rows(layer.step.page_table, slots, tokens, self.group.page_tokens)
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
        at = reference.host_rows(layer.step.page_table, slots, tokens, self.group.page_tokens)
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
