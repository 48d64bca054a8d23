"""The block index by kernels: sizes, launches and scratch."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from topkv import hookimpl
from topkv.hooks.algorithm import AlgorithmSetup
from topkv.ops.topk import topk
from topkv.types import LayerView, Selection
from topkv_authoring.index import PROMPT_ROWS
from topkv_authoring.units import KeptOfTokens
from topkv_trained_gate import kernels
from topkv_trained_gate.algorithm import TrainedGate

TILE = 128
"""Most keys that are multiplied at once."""

STEP_UNITS, PROMPT_UNITS = 4, 16
"""Units of a program."""

TOGETHER = 64
"""Rows times heads of a program that scores for a prompt."""


class TrainedGateTriton(KeptOfTokens, TrainedGate):
    """See ``TrainedGate``. Scratch, shared by the layers of a group: fp32 ``[lanes, U]`` scores,
    and that of top-k for the lanes of a step and for those of ``PROMPT_ROWS`` rows of a prompt.

    Queries of another dtype than the keys, and all of fp32 models, are multiplied in fp32.
    """

    represent_tokens = kernels.write_keys
    rows = 64, 16

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        group, device = self.group, setup.device
        lanes, units = group.max_lanes, group.max_units
        self.scores = torch.empty((lanes, units), dtype=torch.float32, device=device)
        self.ends = torch.zeros(lanes, dtype=torch.int32, device=device)
        self.work = setup.topk(lanes, units, group.select)
        width = min(group.select + 1, units)  # with fewer units nobody asks
        self.prompt_work = setup.topk(PROMPT_ROWS * self.heads, units, width)
        block_h = triton.next_power_of_2(self.heads)
        self.scoring = {
            "PAGE": group.page_tokens,
            "DIM": self.dim,
            "BLOCK_D": max(16, triton.next_power_of_2(self.dim)),
            "num_warps": 4,
            "HEADS": self.heads,
            "UNIT": group.unit,
            "TILE": max(16, min(TILE, triton.next_power_of_2(group.unit))),
        }
        # A product has 16 columns at least.
        step = {"ROWS": 1, "UNITS": STEP_UNITS, "PROMPT": False, "LOCAL": self.local - 1}
        self.steps = []
        for queries in range(1, setup.max_queries + 1):
            held = triton.next_power_of_2(queries)
            sizes = {"QUERIES": queries, "HELD": held, "BLOCK_H": max(16 // held, block_h)}
            self.steps.append(step | sizes)
        together = max(1, TOGETHER // block_h, 16 // block_h)
        self.prompt = {"BLOCK_H": block_h, "ROWS": together, "UNITS": PROMPT_UNITS}
        self.prompt |= {"PROMPT": True, "LOCAL": self.local, "QUERIES": 1, "HELD": 1}

    @property
    def options(self) -> tuple[int]:
        return (self.scoring["BLOCK_D"],)

    @property
    def key_shape(self) -> tuple[int, int]:
        return 1, self.dim

    def keys(self, k: Tensor) -> Tensor:
        self.index_keys(k)  # refuses another shape
        return super().keys(k)

    def written(self, layer: LayerView) -> tuple[Tensor]:
        return (layer.pools["index"],)

    @hookimpl
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, weights: Tensor | None, out: Selection
    ) -> Selection:
        step = layer.step
        sizes = self.steps[q.shape[1] - 1 if q.shape[1] <= self.max_queries else 0]
        q = self.index_queries(q, self.step_rows(layer, q))
        lanes = step.batch * self.heads
        scores, ends = self.scores[:lanes], self.ends[:lanes]
        self._score(layer, q, (step.batch, 0, 0), scores, ends, sizes)
        topk(scores, ends, out.ids, impl="triton", work=self.work)
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
        q = self.index_queries(q, (q.shape[0],))
        units = (start + q.shape[0] - 1) // self.group.unit + 1
        for first in range(0, q.shape[0], PROMPT_ROWS):
            part = q[first : first + PROMPT_ROWS]
            lanes = len(part) * self.heads
            scores = torch.empty((lanes, units), dtype=torch.float32, device=q.device)
            ends = torch.empty(lanes, dtype=torch.int32, device=q.device)
            rows = (len(part), start + first, slot)
            self._score(layer, part, rows, scores, ends, self.prompt)
            found = ids[first : first + len(part)].flatten(0, 1)
            topk(scores, ends, found, impl="triton", work=self.prompt_work)

    def _score(
        self,
        layer: LayerView,
        q: Tensor,
        rows: tuple[int, int, int],
        scores: Tensor,
        ends: Tensor,
        sizes: dict[str, Any],
    ) -> None:
        """Write ``scores [m * H, U]`` and ``ends [m * H]``.

        Args:
            q: ``[m * Q, H, D]``.
            rows: how many; of a prompt the position of the first, and the slot.
            sizes: of a program.
        """
        step, index = layer.step, layer.pools["index"]
        grid = (triton.cdiv(rows[0], sizes["ROWS"]), triton.cdiv(scores.shape[1], sizes["UNITS"]))
        exact = q.dtype is not index.dtype or q.dtype is torch.float32 or not q.is_cuda
        kernels.score_kernel[grid](
            *(q, index, step.page_table, step.slots, step.lengths, step.appended),
            *(scores, ends, *rows),
            *(step.page_table.stride(0), q.stride(0), q.stride(1), scores.stride(0)),
            EXACT=exact,
            **sizes,
            **self.scoring,
        )
