"""Steps that an engine schedules before it knows which drafts of the last one it has kept.

Such an engine counts all drafts of the step that runs as kept, and takes the others back a step
later. So do the requests here. The device knows more: what the model has sampled is there. Lengths
of decode rows, and how many units can be selected, are corrected on the device, behind their
upload. ``high``, the largest length that the ring has seen, stays what the host has counted, which
is never less; so the ring must reach further back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from topkv import SparseCoordinator
from topkv.assembly.assembly import Plugins
from topkv.assembly.stages import Staged
from topkv.config import LoweredConfig
from topkv.plugins.contract import has_hook
from topkv.types import newest_units
from topkv_engines.lengths import LENGTHS, correct
from topkv_engines.rows import sent


class Ahead:
    """Corrects the decode rows of forwards of one coordinator.

    Args:
        coordinator: for whose configuration ``reasons_against`` has none.
    """

    def __init__(self, coordinator: SparseCoordinator) -> None:
        self._coordinator, self._uploader = coordinator, coordinator.requests.step
        device, groups = coordinator.config.device, self._uploader.groups
        rows = [[unit, int(competes)] for unit, competes in groups]
        self._groups = torch.tensor(rows, dtype=torch.int32, device=device)

    def warm_up(self) -> None:
        """Compile what ``correct`` launches: correct a row by nothing."""
        self._correct(self._uploader.packed[0, LENGTHS, :1].clone(), 1)

    def correct(self, lengths: Tensor, decoded: Sequence[int]) -> None:
        """Correct the decode rows of the open forward, in stream order. Hot; outside graphs.

        Args:
            lengths: int32 ``[requests]`` tokens of each request of the step, in the order of the
                engine's rows, with those that it appends; on the device.
            decoded: places of the requests that decode among them, in order.
        """
        forward = self._coordinator.forward
        if forward is None or not decoded:
            return
        known = lengths[: len(decoded)]
        if decoded[-1] >= len(decoded):  # prompts stand between them
            known = lengths.index_select(0, sent(decoded, lengths.device))
        self._correct(known, forward.queries)

    def _correct(self, known: Tensor, queries: int) -> None:
        if self._coordinator.config.impl == "triton":
            from topkv_engines.lengths_kernels import launch

            launch(self._uploader, queries, known, self._groups)
        else:
            correct(self._uploader, queries, known)


def reasons_against(config: LoweredConfig, plugins: Plugins) -> list[str]:
    """Reasons why lengths cannot be corrected on the device alone: what counts tokens on the host,
    and a ring that does not reach back.

    Args:
        config: of the coordinator.
        plugins: its plugins.
    """
    reasons: dict[str, None] = {}
    for group, algorithm, spec in zip(
        config.groups, plugins.algorithms, plugins.specs, strict=True
    ):
        if algorithm is None or spec is None:
            continue
        if spec.settle_period or has_hook(algorithm, "truncated"):
            reasons[f"{group.algorithm} follows on the host which tokens are decoded"] = None
        for link in algorithm.links if isinstance(algorithm, Staged) else ():
            if has_hook(link.stage, "bind"):
                reasons[f"{link.prefix.rstrip('.')} follows requests on the host"] = None
        # In front of the newest token that is kept may lie as many that were rejected as a step
        # appends, but one, and all that it appends.
        unit = group.shape.unit
        least = unit * newest_units(2 * config.max_queries, unit)
        if config.ring_tokens < least:
            reasons[f"ring_tokens must be at least {least}, got {config.ring_tokens}"] = None
    return [*reasons]
