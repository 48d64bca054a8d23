"""Exact top-k of ragged rows, with a defined order of ties."""

from __future__ import annotations

import torch
from torch import Tensor

from topkv.entries import IMPLS
from topkv.hooks.topk import TopK, TopKSetup
from topkv.ops import topk_reference
from topkv.plugins.discovery import hookimpl
from topkv.types import MAX_COLUMNS


class RadixTopK:
    """The core's own kernels: radix select, one program a row. They need no scratch."""

    def __init__(self, setup: TopKSetup) -> None:
        from topkv.ops import topk_kernels

        self._kernels = topk_kernels

    @hookimpl
    def topk(self, scores: Tensor, lengths: Tensor, ids: Tensor) -> None:
        """Write the indices of the K largest scores; see ``topkv.hooks.topk``."""
        self._kernels.topk(scores, lengths, ids)


def topk(
    scores: Tensor, lengths: Tensor, ids: Tensor, *, impl: str, work: TopK | None = None
) -> None:
    """Write the indices of the K largest scores of each row, in ascending index order.

    Of equal scores the one with the lower index wins. Only the first ``lengths[n]`` scores
    of a row count; what is behind them (NaN, say) has no influence. NaN among them counts as
    -inf; -inf is the lowest score and may still be selected; -0.0 equals +0.0; +inf wins. A row
    of K scores or fewer yields all of its indices, padded with -1 on the right.

    No host sync; may be captured in a CUDA graph. The core's kernels hold rows of up to 16,384
    scores in registers. Longer ones they read again for every two bits of the K-th score, which
    is slower than what is made for such rows.

    Args:
        scores: fp32 ``[N, U]``, rows at any stride, columns adjacent, U at most 2**20.
        lengths: int32 ``[N]``; read as ``min(max(length, 0), U)``.
        ids: int32 ``[N, K]``, written completely; rows at any stride, columns adjacent.
        impl: ``"reference"`` or ``"triton"``.
        work: from ``AlgorithmSetup.topk``, of at least these sizes; the core's kernels where it is
            None. Not for the reference.

    Raises:
        ValueError: shapes, dtypes, strides or devices do not fit, or ``impl`` is unknown.
    """
    _check(scores, lengths, ids, impl)
    if ids.numel() == 0:
        return
    if scores.shape[1] == 0:
        ids.fill_(-1)
    elif impl == "reference":
        topk_reference.topk(scores, lengths, ids)
    elif work is not None:
        work.topk(scores, lengths, ids)
    else:
        from topkv.ops import topk_kernels

        topk_kernels.topk(scores, lengths, ids)


def _check(scores: Tensor, lengths: Tensor, ids: Tensor, impl: str) -> None:
    if impl not in IMPLS:
        raise ValueError(f"topk: impl must be one of {', '.join(IMPLS)}, got {impl!r}")
    shapes = [list(each.shape) for each in (scores, lengths, ids)]
    if [*map(len, shapes)] != [2, 1, 2] or any(shape[0] != shapes[0][0] for shape in shapes):
        raise ValueError(
            "topk: expected scores [N, U], lengths [N], ids [N, K], got "
            f"{', '.join(map(str, shapes))}"
        )
    if scores.shape[1] > MAX_COLUMNS:
        raise ValueError(f"topk: {scores.shape[1]} columns, at most {MAX_COLUMNS} are supported")
    dtypes = {"scores": torch.float32, "lengths": torch.int32, "ids": torch.int32}
    for (name, dtype), tensor in zip(dtypes.items(), (scores, lengths, ids), strict=True):
        adjacent = tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
        if tensor.dtype is not dtype or tensor.device != scores.device or not adjacent:
            raise ValueError(
                f"topk: {name} must be {dtype} on {scores.device}, the last dimension of stride "
                f"1, got {tensor.dtype} on {tensor.device} with strides {tensor.stride()}"
            )
