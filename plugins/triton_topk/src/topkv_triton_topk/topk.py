"""Exact top-k with the results of ``topkv.ops.topk``, made for long rows: ``topk: pivot``."""

from __future__ import annotations

from torch import Tensor

from topkv import hookimpl
from topkv.hooks.topk import TopKSetup


class PivotTopK:
    """See ``topkv.hooks.topk``.

    Rows that fit one block of the core's kernels go there, and so do the rest where K is so large
    that no block holds the candidates.

    Attributes:
        scratch: of long rows, int32; None where none is needed. Calls must not overlap.
    """

    def __init__(self, setup: TopKSetup) -> None:
        from topkv.ops import topk_kernels  # references name this top-k, and never make one
        from topkv_triton_topk import launch

        self._most, self._launch, self._core = setup, launch, topk_kernels
        self.scratch: Tensor | None = None
        if block := launch.block_of(setup.columns, setup.select):
            self.scratch = launch.scratch(setup.rows, setup.columns, block, setup.device)

    @hookimpl
    def topk(self, scores: Tensor, lengths: Tensor, ids: Tensor) -> None:
        """See ``topkv.hooks.topk``.

        Raises:
            ValueError: more or longer rows than it was made for, or a larger K.
        """
        rows, columns = scores.shape
        select = ids.shape[1]
        most = self._most
        if rows > most.rows or columns > most.columns or select > most.select:
            raise ValueError(
                f"pivot top-k: {select} of {columns} scores in {rows} rows, and it was made for "
                f"at most {most.select} of {most.columns} in {most.rows}; make one for them"
            )
        block = self._launch.block_of(columns, select)
        if self.scratch is None or block is None:
            self._core.topk(scores, lengths, ids)
        else:
            self._launch.topk(scores, lengths, ids, block, self.scratch)
