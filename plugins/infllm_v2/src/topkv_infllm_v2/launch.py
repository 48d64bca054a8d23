"""Launches of the InfLLM-v2 kernels, and their scratch."""

from __future__ import annotations

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
        self.heads = HeadScores(model, windows, TILE * TILES, device)
        shape = group.max_lanes, group.max_units
        self.scores = torch.empty(shape, dtype=torch.float32, device=device)
        self.closed = torch.zeros(group.max_lanes, dtype=torch.int32, device=device)
        parts = {"STRIDE": self.stride, "PARTS": self.parts}
        sizes = {"TILE": TILE, "TILES": TILES, "STAGES": STAGES, "num_warps": 1}
        self.scoring = constants(kernels.window_kernel, setup, **parts, **sizes)
        self.pooling = constants(kernels.unit_kernel, setup, BLOCK_U=BLOCK_U, **parts)

    @property
    def options(self) -> tuple[int]:
        """Tokens of a part."""
        return (self.stride,)

    @property
    def unit_parts(self) -> int:  # type: ignore[override]
        return self.parts

    def lane_scores(self, layer: LayerView, q: Tensor) -> tuple[Tensor, Tensor]:
        group, step, heads = self.group, layer.step, self.heads
        tables = (step.slots, step.lengths)
        kernels.window_kernel[(step.batch * group.num_kv_heads, heads.blocks)](
            *(q, layer.pools["means"], *tables, step.page_table),
            *(heads.raw, heads.peak, heads.mass),
            *(step.page_table.stride(0), heads.units, heads.blocks, self.model.scale),
            *(q.stride(0), q.stride(1)),
            **self.scoring,
        )
        windows, _ = heads.lanes(step)
        lanes = step.batch * group.lane_heads
        scores, closed = self.scores[:lanes], self.closed[:lanes]
        kernels.unit_kernel[(lanes, triton.cdiv(group.max_units, BLOCK_U))](
            *(windows, *tables, scores, closed, group.max_units),
            *(self.sink_units, self.recent_units),
            **self.pooling,
        )
        return scores, closed
