"""The stage with a kernel; its reference is ``topkv_regranulate.stage``."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from topkv.hooks.stage import StageSetup
from topkv_regranulate.stage import Regranulate

MAX_BLOCK = 1024


class RegranulateKernels(Regranulate):
    """As ``Regranulate``, in one launch a layer and without an allocation."""

    def __init__(self, setup: StageSetup) -> None:
        super().__init__(setup)
        marks = (setup.group.max_lanes, setup.group.max_units)
        self._marks = torch.zeros(marks, dtype=torch.uint8, device=setup.device)

    def list_units(
        self,
        tokens: Tensor,
        lengths: Tensor,
        ids: Tensor,
        extra: Tensor,
        appended: Tensor | None = None,
    ) -> None:
        lanes, select = tokens.shape
        if not lanes:
            return
        units = self.group.max_units
        regranulate_kernel[(lanes,)](
            *(tokens, lengths, lengths if appended is None else appended, ids, extra, self._marks),
            *(tokens.stride(0), ids.stride(0)),
            *(select, ids.shape[1], units, lanes // len(lengths)),
            UNIT=self.group.unit,
            SEVERAL=appended is not None,
            BLOCK=min(MAX_BLOCK, triton.next_power_of_2(max(select, units, 16))),
            num_warps=4,
        )


@triton.jit(do_not_specialize=["K", "width", "units", "lane_heads"])
def regranulate_kernel(
    p_tokens,
    p_lengths,
    p_appended,
    p_ids,
    p_extra,
    p_marks,
    s_tokens,
    s_ids,
    K,
    width,
    units,
    lane_heads,
    UNIT: tl.constexpr,
    SEVERAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per lane: clear the marks of its closed units, mark, and list what is marked.

    Equal units meet in one mark, so nothing is sorted. The time grows with the closed units, a
    byte each that is written and read again, and with K.
    """
    lane = tl.program_id(0).to(tl.int64)
    p_tokens += lane * s_tokens
    p_ids += lane * s_ids
    p_marks += lane * units
    at = tl.arange(0, BLOCK)
    length = tl.load(p_lengths + lane // lane_heads)
    new = 1
    if SEVERAL:
        new = tl.maximum(tl.load(p_appended + lane // lane_heads), 1)
    closed = tl.minimum(tl.maximum(length - new, 0) // UNIT, units)
    for first in range(0, closed, BLOCK):
        tl.store(p_marks + first + at, tl.zeros((BLOCK,), tl.uint8), first + at < closed)
    tl.debug_barrier()
    counted = tl.full((), 0, tl.int32)
    for first in range(0, K, BLOCK):
        token = tl.load(p_tokens + first + at, first + at < K, other=-1)
        valid = (token >= 0) & (token < closed * UNIT)
        tl.store(p_marks + token // UNIT, tl.full((BLOCK,), 1, tl.uint8), valid)
        counted += tl.sum(valid.to(tl.int32), 0)
    tl.debug_barrier()
    count = tl.full((), 0, tl.int32)
    for first in range(0, closed, BLOCK):
        held = tl.load(p_marks + first + at, first + at < closed, other=0).to(tl.int32)
        rank = count + tl.cumsum(held, 0) - held
        tl.store(p_ids + rank, first + at, held > 0)
        count += tl.sum(held, 0)
    for first in range(0, width, BLOCK):
        column = first + at
        tl.store(
            p_ids + column, tl.full((BLOCK,), -1, tl.int32), (column >= count) & (column < width)
        )
    tl.store(p_extra + lane, (count * UNIT - counted).to(tl.int64))
