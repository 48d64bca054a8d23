"""Exact top-k with the results of ``topkv.ops.topk``, made for long rows: ``topk: pivot``."""

from __future__ import annotations

import torch
from torch import Tensor

from topkv import hookimpl
from topkv.ops import topk_kernels
from topkv_triton_topk import launch


class PivotTopK:
    """See ``topkv.hooks.topk``.

    Rows that fit one block of the core's kernels go there, and so do the rest where K is so large
    that no block holds the candidates.

    Args:
        rows, columns, select: most rows and columns of scores, and K.
        device: where they lie.

    Attributes:
        scratch: of long rows, int32; None where none is needed. Calls must not overlap.
    """

    def __init__(self, rows: int, columns: int, select: int, device: torch.device) -> None:
        self._rows, self._columns, self._select = rows, columns, select
        self.scratch: Tensor | None = None
        if block := launch.block_of(columns, select):
            self.scratch = launch.workspace(rows, columns, block, device)

    @hookimpl
    def topk(self, scores: Tensor, lengths: Tensor, ids: Tensor) -> None:
        """See ``topkv.hooks.topk.topk``.

        Raises:
            ValueError: more or longer rows than it was made for, or a larger K.
        """
        rows, columns = scores.shape
        select = ids.shape[1]
        if rows > self._rows or columns > self._columns or select > self._select:
            raise ValueError(
                f"pivot top-k: {select} of {columns} scores in {rows} rows, and it was made for "
                f"at most {self._select} of {self._columns} in {self._rows}; make one for them"
            )
        block = launch.block_of(columns, select)
        if self.scratch is None or block is None:
            topk_kernels.topk(scores, lengths, ids)
        else:
            launch.topk(scores, lengths, ids, block, self.scratch)
