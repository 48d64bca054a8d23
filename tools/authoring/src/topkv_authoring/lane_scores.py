"""From scores of query heads to scores of lanes, for algorithms that score closed units.

A kernel of the algorithm writes ``HeadScores.raw``, and of each block of units the maximum and the
exponential sum, which ``lane_scores_kernels.fold`` keeps while the scores are in registers.
``HeadScores.lanes`` combines them into scores of lanes: the log of the sum of the softmaxes of a
lane's query heads. Its reference is ``RankedUnits.combine``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topkv.types import GroupShape, ModelShape, StepTensors

AT_ONCE = 2048
"""Scores that one program writes, of all heads together. Half as many programs of twice as many
scores took 1 to 2 us more in each of five cells from 1 x 32K to 16 x 128K on an H200."""


class HeadScores:
    """Scratch of scores of up to ``max_requests`` rows, at fixed addresses.

    Needs Triton. Memory may be on a CPU, for its interpreter.

    Args:
        model, group: as in the setup of the algorithm.
        block: units whose maximum and exponential sum are kept together.
        device: of the scratch.

    Attributes:
        raw: fp32 ``[max_requests * H, U]``, scaled scores, with U = ``group.max_units``. Those of
            closed units are written, and no others.
        peak, mass: fp32 ``[max_requests * H, blocks]`` of each block with a closed unit: the
            maximum m of its scores s, and the sum of ``exp(s - m)``.
        blocks: of U units.
    """

    def __init__(
        self, model: ModelShape, group: GroupShape, block: int, device: torch.device
    ) -> None:
        import triton

        units, heads = group.max_units, group.max_requests * model.num_heads
        self.lane_heads, self.units, self.blocks = group.lane_heads, units, -(-units // block) or 1
        self.raw = torch.empty((heads, units), dtype=torch.float32, device=device)
        self.peak, self.mass = torch.empty(
            (2, heads, self.blocks), dtype=torch.float32, device=device
        )
        self.scores = torch.empty((group.max_lanes, units), dtype=torch.float32, device=device)
        self.closed = torch.zeros(group.max_lanes, dtype=torch.int32, device=device)
        each = model.num_heads // group.lane_heads
        block_h = triton.next_power_of_2(each)
        self.constants = {
            "LANE_HEADS": group.lane_heads,
            "HEADS": each,
            "UNIT": group.unit,
            "BLOCK_U": block,
            "BLOCK_H": block_h,
            "BLOCK_P": min(64, triton.next_power_of_2(self.blocks)),
            "BLOCK_V": max(16, min(AT_ONCE // block_h, triton.next_power_of_2(max(units, 16)))),
            "num_warps": 4,
        }

    def lanes(self, step: StepTensors, sinks: int = 0, recent: int = 0) -> tuple[Tensor, Tensor]:
        """Make the scores that a top-k ranks from the head scores of a step's rows. Hot.

        Args:
            step: the step, with the lengths and slots of its rows.
            sinks, recent: units at either end of the closed ones that get +inf.

        Returns:
            As ``RankedUnits.lane_scores``, valid until the next call.
        """
        import triton

        from topkv_authoring.lane_scores_kernels import lanes_kernel

        lanes = step.batch * self.lane_heads
        if lanes:
            grid = (lanes, triton.cdiv(self.units, self.constants["BLOCK_V"]))
            lanes_kernel[grid](
                *(self.raw, self.peak, self.mass, step.slots, step.lengths),
                *(self.scores, self.closed, self.units, self.blocks, sinks, recent),
                **self.constants,
            )
        return self.scores[:lanes], self.closed[:lanes]
