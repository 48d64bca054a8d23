"""Hook spec of an exact top-k, which algorithms select with.

``factory(setup)`` gives, for a ``TopKSetup``, an object with its scratch. An algorithm asks for
one with ``AlgorithmSetup.topk`` when it is made, and gets the one that the configuration names.
Reference implementations of algorithms select by themselves, so an entry names one factory for
all implementations, or one for ``"triton"`` alone.
"""

from __future__ import annotations

from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor

from topkv.plugins.discovery import hookspec


@frozen
class TopKSetup:
    """The argument of the factory of an exact top-k.

    Attributes:
        rows, columns, select: most rows and columns of scores, and K.
        device: where the scores are.
    """

    rows: int
    columns: int
    select: int
    device: torch.device


class TopK(Protocol):
    """Exact top-k with its scratch."""

    @hookspec
    def topk(self, scores: Tensor, lengths: Tensor, ids: Tensor) -> None:
        """Write the indices of the K largest scores of each row: see ``topkv.ops.topk.topk``. Hot.

        The result is defined to the last tie, so that no algorithm selects otherwise with another
        implementation. Arguments have been checked, and no dimension is 0.

        Args:
            scores: fp32 ``[N, U]``, rows at any stride, columns adjacent.
            lengths: int32 ``[N]``.
            ids: int32 ``[N, K]``, written completely; rows at any stride.
        """
