"""Hook spec of an exact top-k, which algorithms select with.

``factory(rows, columns, select, device)`` gives an object with its scratch, for at most so many
rows of scores, of at most so many columns, and K = select. An algorithm asks for one with
``topkv.ops.topk.workspace`` when it is made, and gets the one that the configuration names.
"""

from __future__ import annotations

from torch import Tensor

from topkv.hooks.registry import hookspec


@hookspec(firstresult=True)
def topk(scores: Tensor, lengths: Tensor, ids: Tensor) -> None:
    """Write the indices of the K largest scores of each row: see ``topkv.ops.topk.topk``. Hot.

    The result is defined to the last tie, so that no algorithm selects otherwise with another
    implementation. Arguments have been checked, and no dimension is 0.

    Args:
        scores: fp32 ``[N, U]``, rows at any stride, columns adjacent.
        lengths: int32 ``[N]``.
        ids: int32 ``[N, K]``, written completely; rows at any stride.
    """
