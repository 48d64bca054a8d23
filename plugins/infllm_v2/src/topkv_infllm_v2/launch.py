"""Launches of the InfLLM-v2 kernels, and their scratch."""

from __future__ import annotations

from typing import Any

import attrs
import torch
import triton
from torch import Tensor

from topkv.hooks.algorithm import AlgorithmSetup
from topkv.types import LayerView
from topkv_authoring.constants import constants
from topkv_authoring.lane_scores import HeadScores
from topkv_authoring.units import KeptByKernels
from topkv_infllm_v2 import kernels
from topkv_infllm_v2.algorithm import InfLLMv2

TILE, TILES, STAGES = 32, 4, 3
"""Windows of a tile, tiles of one program of the window kernel, loads in flight."""

MOST_G = 64
"""Most query heads that a program holds where rows have several queries; more share the keys."""

BLOCK_U = 128
"""Units of one program of the kernel that takes the best windows."""


class InfLLMv2Triton(KeptByKernels, InfLLMv2):
    """InfLLM-v2 in kernels, with every constant worked out once.

    Scratch: ``HeadScores`` of windows, a unit of ``stride`` tokens each, and of lanes fp32
    ``[max_lanes, U]`` and int32 ``[max_lanes]``.
    """

    impl = "triton"
    represent_unit = kernels.write_means

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        model, group, device = self.model, self.group, setup.device
        windows = attrs.evolve(group, unit=self.stride, max_units=group.max_units * self.parts)
        most = setup.max_queries
        self.heads = HeadScores(model, windows, TILE * TILES, device, most)
        shape = group.max_lanes, group.max_units
        self.scores = torch.empty(shape, dtype=torch.float32, device=device)
        self.closed = torch.zeros(group.max_lanes, dtype=torch.int32, device=device)
        parts = {"STRIDE": self.stride, "PARTS": self.parts}
        sizes = {"TILE": TILE, "TILES": TILES, "STAGES": STAGES, "num_warps": 1}
        self.scoring, self.pooling = list[dict[str, Any]](), list[dict[str, Any]]()
        for queries in range(1, most + 1):
            made = constants(kernels.window_kernel, setup, queries, **parts, **sizes)
            # Of one query all heads are held, however many.
            held = MOST_G if queries > 1 else made["BLOCK_G"]
            self.scoring.append(made | {"BLOCK_G": min(made["BLOCK_G"], held)})
            own = constants(kernels.unit_kernel, setup, queries, BLOCK_U=BLOCK_U, **parts)
            self.pooling.append(own)

    @property
    def options(self) -> tuple[int]:
        """Tokens of a part."""
        return (self.stride,)

    @property
    def unit_parts(self) -> int:  # type: ignore[override]
        return self.parts

    def lane_scores(self, layer: LayerView, q: Tensor) -> tuple[Tensor, Tensor]:
        group, step, heads = self.group, layer.step, self.heads
        tables, queries = (step.slots, step.lengths, step.appended), q.shape[1]
        queries //= self.model.num_heads
        scoring = self.scoring[queries - 1]
        blocks = step.batch * group.num_kv_heads * -(-scoring["GROUP"] // scoring["BLOCK_G"])
        kernels.window_kernel[(blocks, heads.blocks)](
            *(q, layer.pools["means"], *tables, step.page_table),
            *(heads.raw, heads.peak, heads.mass),
            *(step.page_table.stride(0), heads.units, heads.blocks, self.model.scale),
            *(q.stride(0), q.stride(1)),
            **scoring,
        )
        windows, _ = heads.lanes(step, queries=queries)
        lanes = step.batch * group.lane_heads
        scores, closed = self.scores[:lanes], self.closed[:lanes]
        kernels.unit_kernel[(lanes, triton.cdiv(group.max_units, BLOCK_U))](
            *(windows, *tables, scores, closed, group.max_units),
            *(self.sink_units, self.recent_units),
            **self.pooling[queries - 1],
        )
        return scores, closed
