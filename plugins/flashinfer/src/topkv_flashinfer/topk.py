"""Exact top-k by FlashInfer, with the results of ``topkv.ops.topk``.

The library's radix selection (``top_k_ragged_transform``) takes lengths from the device and breaks
ties by the lower index. It orders scores by their bits and returns ids in no order, so one kernel
before it makes NaN -inf and -0.0 +0.0, in a copy, and one behind it sorts the ids.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from topkv.errors import CapabilityError
from topkv_flashinfer import kernels, providers

MAX_COLUMNS = 1 << 20
"""Longest row, as in ``topkv.ops.topk``."""

MAX_SELECT = 2048
"""Largest K: what the library's selection offers under CUDA graphs on every device."""

SMALLER_INDEX = 1
"""The library's ``TopKTieBreak.SMALL``."""

BLOCK = 4096
"""Columns that a program cleans."""


def workspace(rows: int, columns: int, select: int, device: torch.device) -> Tensor:
    """Scratch for ``topk`` of at most so many rows, to be made once: int32.

    Calls that share one must not overlap: one for each instance that selects on one stream.
    """
    return torch.zeros(rows * (columns + 2), dtype=torch.int32, device=device)


def topk(
    scores: Tensor, lengths: Tensor, ids: Tensor, *, impl: str, work: Tensor | None = None
) -> None:
    """See ``topkv.ops.topk.topk``: the same arguments, and the same ids in the same places.

    No host sync; may be captured in a CUDA graph. The library takes its result, ``[N, K]``, from
    torch's allocator at each call.

    Args:
        scores: fp32 ``[N, U]``, rows at any stride, columns adjacent, U at most 2**20.
        lengths: int32 ``[N]``; read as ``min(max(length, 0), U)``.
        ids: int32 ``[N, K]``, written completely; rows at any stride; K at most 2048.
        impl: ``"triton"``, for what goes on around the library's kernels.
        work: from ``workspace`` of at least N rows and of this U.

    Raises:
        ValueError: shapes, dtypes, strides or devices do not fit, or ``impl`` is unknown.
        CapabilityError: FlashInfer is missing.
    """
    _check(scores, lengths, ids, impl)
    rows, columns, select = *scores.shape, ids.shape[1]
    if ids.numel() == 0:
        return
    if columns == 0:
        ids.fill_(-1)
        return
    work = workspace(rows, columns, select, scores.device) if work is None else work
    if work.numel() < rows * (columns + 2):
        raise ValueError(
            f"topk: work has {work.numel()} elements, {rows} rows of {columns} need "
            f"{rows * (columns + 2)}; make it for them"
        )
    clean = work[: rows * columns].view(torch.float32).view(rows, columns)
    sizes, offsets = work[rows * columns :][: 2 * rows].view(2, rows)
    offsets.zero_()
    kernels.clean_kernel[(rows, triton.cdiv(columns, BLOCK))](
        *(scores, lengths, clean, sizes, columns, scores.stride(0)), BLOCK=BLOCK
    )
    most = min(select, columns)
    found = _library()["top_k_ragged_transform"](
        *(clean, offsets, sizes, most), tie_break=SMALLER_INDEX, dsa_graph_safe=True
    )
    kernels.order_kernel[(rows,)](
        *(found, ids, most, select, found.stride(0), ids.stride(0)),
        BLOCK=triton.next_power_of_2(select),
        num_warps=8,
    )


@cache
def _library() -> providers.Library:
    library, tried = providers.find("topk")
    if library is None:
        raise CapabilityError(
            f"flashinfer's top-k is not usable; {providers.INSTALL}. Tried", tried
        )
    return library


def _check(scores: Tensor, lengths: Tensor, ids: Tensor, impl: str) -> None:
    if impl != "triton":
        raise ValueError(f"topk: impl must be 'triton', got {impl!r}: there is no reference here")
    shapes = [list(tensor.shape) for tensor in (scores, lengths, ids)]
    if [len(shape) for shape in shapes] != [2, 1, 2] or len({shape[0] for shape in shapes}) != 1:
        raise ValueError(f"topk: expected scores [N, U], lengths [N], ids [N, K], got {shapes}")
    if scores.shape[1] > MAX_COLUMNS or ids.shape[1] > MAX_SELECT:
        raise ValueError(
            f"topk: expected at most {MAX_COLUMNS} columns and K up to {MAX_SELECT}, got "
            f"{scores.shape[1]} and {ids.shape[1]}; use topkv.ops.topk"
        )
    for name, tensor, dtype in (
        ("scores", scores, torch.float32),
        ("lengths", lengths, torch.int32),
        ("ids", ids, torch.int32),
    ):
        if tensor.dtype is not dtype:
            raise ValueError(f"topk: {name} must be {dtype}, got {tensor.dtype}")
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"topk: the last dimension of {name} must have stride 1")
        if tensor.device != scores.device:
            raise ValueError(
                f"topk: {name} is on {tensor.device}, scores are on {scores.device}; move it"
            )
