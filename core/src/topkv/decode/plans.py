"""The plans of a group: one for each layer whose loads are on their way at once."""

from __future__ import annotations

import torch
from attrs import astuple
from torch import Tensor

from topkv.config import LoweredGroup
from topkv.types import Plan


class Plans:
    """Allocates the plans of a group, and cuts them to the lanes of a forward.

    Args:
        group: a layer that selects for itself has one, and so has each that shares with it.
        lanes: most lanes of a forward.
        device: where the plans are.
    """

    def __init__(self, group: LoweredGroup, lanes: int, device: torch.device) -> None:
        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        select = group.shape.select
        self._plans = [
            Plan(
                slots=ints(lanes, select),
                count=ints(lanes),
                miss_hosts=ints(lanes, select),
                miss_slots=ints(lanes, select),
                misses=ints(lanes),
            )
            for _ in range(max(map(len, group.turns), default=0))
        ]

    def narrow(self, lanes: int) -> list[Plan]:
        """Return the first ``lanes`` lanes of all plans."""
        return [
            Plan(*(each[:lanes] for each in astuple(plan, recurse=False))) for plan in self._plans
        ]
