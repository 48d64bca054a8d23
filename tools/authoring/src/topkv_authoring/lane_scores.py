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
        max_queries: most queries of a row, whose heads are all heads of its lanes.

    Attributes:
        raw: fp32 ``[max_requests * H, U]``, scaled scores, with U = ``group.max_units``. Those of
            closed units are written, and no others.
        peak, mass: fp32 ``[max_requests * H, blocks]`` of each block with a closed unit: the
            maximum m of its scores s, and the sum of ``exp(s - m)``.
        blocks: of U units.
    """

    def __init__(
        self,
        model: ModelShape,
        group: GroupShape,
        block: int,
        device: torch.device,
        max_queries: int = 1,
    ) -> None:
        import triton

        units, heads = group.max_units, group.max_requests * model.num_heads * max_queries
        self.lane_heads, self.units, self.blocks = group.lane_heads, units, -(-units // block) or 1
        self.raw = torch.empty((heads, units), dtype=torch.float32, device=device)
        self.peak, self.mass = torch.empty(
            (2, heads, self.blocks), dtype=torch.float32, device=device
        )
        self.scores = torch.empty((group.max_lanes, units), dtype=torch.float32, device=device)
        self.closed = torch.zeros(group.max_lanes, dtype=torch.int32, device=device)
        each, self.constants = model.num_heads // group.lane_heads, []
        for queries in range(1, max_queries + 1):
            block_h = triton.next_power_of_2(each * queries)
            block_v = min(AT_ONCE // block_h, triton.next_power_of_2(max(units, 16)))
            constants = {
                "LANE_HEADS": group.lane_heads,
                "HEADS": each * queries,
                "QUERIES": queries,
                "GROUP": model.group_size,
                "UNIT": group.unit,
                "BLOCK_U": block,
                "BLOCK_H": block_h,
                "BLOCK_P": min(64, triton.next_power_of_2(self.blocks)),
                "BLOCK_V": max(16, block_v),
                "num_warps": 4,
            }
            self.constants.append(constants)

    def lanes(
        self, step: StepTensors, sinks: int = 0, recent: int = 0, queries: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Make the scores that a top-k ranks from the head scores of a step's rows. Hot.

        Args:
            step: the step, with the lengths and slots of its rows.
            sinks, recent: units at either end of the closed ones that get +inf.
            queries: queries of a row, padding included.

        Returns:
            As ``RankedUnits.lane_scores``, valid until the next call.
        """
        import triton

        from topkv_authoring.lane_scores_kernels import lanes_kernel

        lanes, constants = step.batch * self.lane_heads, self.constants[queries - 1]
        if lanes:
            grid = (lanes, triton.cdiv(self.units, constants["BLOCK_V"]))
            lanes_kernel[grid](
                *(self.raw, self.peak, self.mass, step.slots, step.lengths, step.appended),
                *(self.scores, self.closed, self.units, self.blocks, sinks, recent),
                **constants,
            )
        return self.scores[:lanes], self.closed[:lanes]
