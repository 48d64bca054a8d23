"""Exact top-k by FlashInfer, with the results of ``topkv.ops.topk``: ``topk: flashinfer``.

The library's radix selection (``top_k_ragged_transform``) takes lengths from the device and breaks
ties by the lower index. It orders scores by their bits and returns ids in no order, so one kernel
before it makes NaN -inf and -0.0 +0.0, in a copy, and one behind it sorts the ids.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from topkv import hookimpl
from topkv.errors import CapabilityError
from topkv_flashinfer import kernels, providers

MAX_SELECT = 2048
"""Largest K: what the library's selection offers under CUDA graphs on every device."""

SMALLER_INDEX = 1
"""The library's ``TopKTieBreak.SMALL``."""

BLOCK = 4096
"""Columns that a program cleans."""


class FlashInferTopK:
    """See ``topkv.hooks.topk``. The library takes its result from torch's allocator at each call.

    Args:
        rows, columns, select: most rows and columns of scores, and K, at most 2048.
        device: a CUDA device.

    Raises:
        CapabilityError: with every reason, a missing library among them.
    """

    def __init__(self, rows: int, columns: int, select: int, device: torch.device) -> None:
        library, tried = providers.find("topk")
        reasons = []
        if select > MAX_SELECT:
            reasons.append(f"it selects at most {MAX_SELECT}, got {select}; lower budget")
        if torch.device(device).type != "cuda":
            reasons.append(f"it needs a CUDA device, got {device}; leave topk at its default")
        if library is None:
            reasons.append(f"it is not usable: {providers.INSTALL}; tried {'; '.join(tried)}")
        if reasons or library is None:
            raise CapabilityError("FlashInfer's top-k cannot serve", reasons)
        self._make(library, rows, columns, device)

    def _make(
        self, library: providers.Library, rows: int, columns: int, device: torch.device
    ) -> None:
        """The scratch: a copy of the scores, lengths, and offsets of 0."""
        self._library = library
        self._clean = torch.zeros(rows * columns, dtype=torch.float32, device=device)
        self._sizes, self._offsets = torch.zeros(2, rows, dtype=torch.int32, device=device)

    @hookimpl
    def topk(self, scores: Tensor, lengths: Tensor, ids: Tensor) -> None:
        """See ``topkv.hooks.topk.topk``.

        Raises:
            ValueError: more scores than there is scratch for.
        """
        rows, columns, select = *scores.shape, ids.shape[1]
        if rows > len(self._sizes) or rows * columns > len(self._clean):
            raise ValueError(
                f"flashinfer: {rows} rows of {columns} scores, and the scratch holds "
                f"{len(self._sizes)} rows and {len(self._clean)} scores; make it for them"
            )
        clean = self._clean[: rows * columns].view(rows, columns)
        sizes, offsets = self._sizes[:rows], self._offsets[:rows]
        kernels.clean_kernel[(rows, triton.cdiv(columns, BLOCK))](
            *(scores, lengths, clean, sizes, columns, scores.stride(0)), BLOCK=BLOCK
        )
        most = min(select, columns)
        found = self._library["top_k_ragged_transform"](
            *(clean, offsets, sizes, most), tie_break=SMALLER_INDEX, dsa_graph_safe=True
        )
        kernels.order_kernel[(rows,)](
            *(found, ids, most, select, found.stride(0), ids.stride(0)),
            BLOCK=triton.next_power_of_2(select),
            num_warps=8,
        )
