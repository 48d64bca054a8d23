"""What the plans of both wrappers share."""

from __future__ import annotations

import math

import torch

from topkv.types import GroupShape

LN2 = math.log(2.0)
"""The library's log-sum-exp is to the base of 2."""

BLOCK = 1024
"""Columns of a table that a program takes."""


def table_width(group: GroupShape) -> int:
    """Columns of the widest page table of a group: its selection and the tail, or all pages."""
    return group.select + 1 if group.residency == "sparse" else group.max_units


def refuse_capture(device: torch.device, lanes: int, width: int) -> None:
    """Planning is host work, so a capture must not be the first to see a shape.

    Raises:
        RuntimeError: a CUDA graph is being captured.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"flashinfer: {lanes} lanes with page tables of {width} columns have not been "
            "planned, and a CUDA graph is being captured; planning is host work that a graph "
            "cannot hold. Run one forward of this batch size before capturing it"
        )


def settle(device: torch.device) -> None:
    """Wait for a new plan, which is on its way from pinned memory, whoever calls next."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def ramp(lanes: int, step: int) -> torch.Tensor:
    """``0, step, ..`` int32 ``[lanes + 1]`` on the CPU: rows of a constant count."""
    return torch.arange(0, lanes * step + 1, step, dtype=torch.int32)
