"""Exact top-k by one kernel in CUDA C++, with the results of ``topkv.ops.topk``: ``topk: cuda``.

A cluster of thread blocks holds a row in its shared memory. A random sample gives a pivot that a
few more than K scores exceed in all likelihood. The blocks of the cluster exchange these
candidates, and each block finds the K-th among all of them and writes the indices of its own
part. Rows with too few or too many candidates are searched from shared memory. The sample decides
the time, and nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topkv import hookimpl
from topkv.errors import CapabilityError
from topkv.hooks.topk import TopKSetup
from topkv_cuda_topk import compiler
from topkv_cuda_topk.shapes import MAX_COLUMNS, MAX_ROOM, shape_of


class CudaTopK:
    """See ``topkv.hooks.topk``. It has no scratch: calls may overlap.

    Args:
        setup: sizes, and a CUDA device of compute capability 9.0 or more.

    Raises:
        CapabilityError: with every reason, a missing library among them.
    """

    def __init__(self, setup: TopKSetup) -> None:
        self._columns, self._select = max(setup.columns, 1), setup.select
        reasons = self._limits(self._columns, self._select) + self._machine(setup.device)
        if not reasons:
            reasons = self._make(setup.rows, setup.device)
        if reasons:
            raise CapabilityError("the CUDA top-k cannot serve", reasons)

    def _make(self, rows: int, device: torch.device) -> list[str]:
        """Make the kernel, or return the reasons why there is none."""
        count = torch.cuda.get_device_properties(device).multi_processor_count
        shape = shape_of(rows, self._columns, self._select, count)
        self._index = torch.cuda.current_device() if device.index is None else device.index
        try:
            self._kernel = compiler.kernel_for(shape, self._index)
        except RuntimeError as error:
            return [f"it cannot be compiled or loaded: {error}"]
        if self._kernel.clusters == 0:
            return [f"{device} has no place for a cluster of {shape}"]
        return []

    @staticmethod
    def _limits(columns: int, select: int) -> list[str]:
        """Return the reasons why these sizes cannot be served."""
        reasons = []
        if columns > MAX_COLUMNS:
            reasons.append(
                f"a row has at most {MAX_COLUMNS} scores, got {columns}; "
                "lower max_request_tokens or leave topk at its default"
            )
        else:
            room = shape_of(1, columns, select, 1).room
            if room > MAX_ROOM:
                reasons.append(
                    f"it has room for {MAX_ROOM} candidates, and {select} of {columns} need "
                    f"{room}; lower budget or leave topk at its default"
                )
        return reasons

    @staticmethod
    def _machine(device: torch.device) -> list[str]:
        """Return the reasons why this device or its libraries cannot serve."""
        reasons = []
        if device.type != "cuda":
            reasons.append(f"it needs a CUDA device, got {device}; leave topk at its default")
        elif torch.cuda.get_device_capability(device) < compiler.CAPABILITY:
            reasons.append(
                f"it needs compute capability 9.0 or more, {device} has "
                f"{torch.cuda.get_device_capability(device)}; leave topk at its default"
            )
        libraries, tried = compiler.find()
        if libraries is None:
            reasons.append(f"it cannot compile: {'; '.join(tried)}; {compiler.INSTALL}")
        return reasons

    @hookimpl
    def topk(self, scores: Tensor, lengths: Tensor, ids: Tensor) -> None:
        """See ``topkv.hooks.topk.TopK``.

        Raises:
            ValueError: longer rows or a larger K than it was made for, or another device.
        """
        columns, select = scores.shape[1], ids.shape[1]
        if columns > self._columns or select > self._select or scores.get_device() != self._index:
            raise ValueError(
                f"cuda top-k: {select} of {columns} scores on {scores.device}, and it was made "
                f"for at most {self._select} of {self._columns} on cuda:{self._index}; make one "
                "for them"
            )
        self._kernel.launch(scores, lengths, ids)
