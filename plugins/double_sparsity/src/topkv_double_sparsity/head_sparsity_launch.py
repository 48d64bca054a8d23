"""Head sparsity by kernels: launches, scratch, and the algorithm that uses them."""

from __future__ import annotations

import torch
from torch import Tensor

from topkv import hookimpl
from topkv.hooks.algorithm import AlgorithmSetup
from topkv.ops.topk import topk
from topkv.types import LayerView
from topkv_double_sparsity.head_sparsity import join
from topkv_double_sparsity.head_sparsity_kernels import entropy_kernel, flat_kernel
from topkv_double_sparsity.launch import DoubleSparsityTriton, Launcher


class FlatLanes:
    """The kernels of one group, and their scratch.

    Args:
        launcher: of the group; its queries and constants are used.
        device: of both.
    """

    def __init__(self, launcher: Launcher, device: torch.device) -> None:
        self.launcher, self.blocks = launcher, launcher.sample_blocks
        shape = (len(launcher.total), self.blocks, launcher.columns)
        self.peak, self.mass, self.moment = torch.empty(
            (3, *shape), dtype=torch.float32, device=device
        )
        self.flat = torch.zeros(launcher.group.max_lanes, dtype=torch.int32, device=device)
        sampling, scoring = launcher.sampling, launcher.scoring
        takes = (*entropy_kernel.arg_names, "num_warps")
        self.measuring = {name: sampling[name] for name in sampling if name in takes}
        self.parting = {name: scoring[name] for name in scoring if name in flat_kernel.arg_names}

    def take(self, layer: LayerView, closed: Tensor) -> Tensor:
        """Tokens of flat lanes, int32 ``[N]``; those lanes have none left in ``closed [N]``.

        Comes after ``Launcher.score`` of the same queries.
        """
        launcher, step, settings = self.launcher, layer.step, self.launcher.settings
        where = (*launcher.readable(layer), step.slots, step.lengths, step.page_table)
        work = (self.peak, self.mass, self.moment)
        bundles = step.batch * (launcher.group.num_kv_heads // launcher.bundle)
        entropy_kernel[(bundles, self.blocks)](
            *(launcher.query, launcher.total, *work, *where),
            *(step.page_table.stride(0), self.blocks, launcher.scale),
            **self.measuring,
        )
        flat_kernel[(bundles // self.parting["BUNDLES"],)](
            *(*work, step.slots, step.lengths, closed, self.flat),
            *(self.blocks, launcher.group.select, settings.flat),
            **self.parting,
        )
        return self.flat[: len(closed)]


class HeadSparsityTriton(DoubleSparsityTriton):
    """``head_sparsity.HeadSparsity`` by kernels."""

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        group, few = self.group, self.settings.flat_select
        self.lanes = FlatLanes(self.launcher, setup.device)
        self.few = torch.empty((group.max_lanes, few), dtype=torch.int32, device=setup.device)
        self.few_work = setup.topk(group.max_lanes, group.max_units, few)

    @hookimpl
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, weights: Tensor | None, ids: Tensor
    ) -> None:
        scores, closed = self.score(layer, self._queries(q))
        flat, few = self.lanes.take(layer, closed), self.few[: len(ids)]
        topk(scores, closed, ids, impl="triton", work=self.work)
        topk(scores, flat, few, impl="triton", work=self.few_work)
        join(ids, few)


def make(setup: AlgorithmSetup) -> DoubleSparsityTriton:
    """The kernels: with head sparsity where the parameters ask for it."""
    asked = setup.params.get("head_sparsity") is not None
    return (HeadSparsityTriton if asked else DoubleSparsityTriton)(setup)
