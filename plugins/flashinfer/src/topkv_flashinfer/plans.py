"""Pages, widths and base of logarithms that the plans of both wrappers share."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from attrs import frozen
from torch import Tensor

from topkv.ops import pdl
from topkv.types import GroupShape, LayerView, Plan, Tables, newest_units
from topkv_authoring.page_table import Listing, adapt_page_table
from topkv_flashinfer import kernels

LN2 = math.log(2.0)
"""The library's log-sum-exp is to the base of 2."""

BLOCK = 1024
"""Columns of a table that a program takes."""


@frozen(eq=False)
class Pages:
    """The pages of a batch as compressed rows, as many a lane as its table has columns.

    ``adapt`` writes them along with the table, and attaches itself to it; a table that comes from
    elsewhere is copied. One buffer serves every shape that fits: it holds one table at a time. A
    plan writes there too.

    Attributes:
        indices: int32, for the widest batch.
        last: int32, tokens on the last page of each lane.
        seen: int32, tokens of each lane where rows have several queries.
    """

    indices: Tensor
    last: Tensor
    seen: Tensor

    @classmethod
    def empty(cls, lanes: int, width: int, device: torch.device) -> Pages:
        def ints(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        return cls(ints(lanes * width), ints(lanes), ints(lanes))

    def holds(self, lanes: int, width: int) -> bool:
        """Return True if there is room for a table of these sizes."""
        return lanes * width <= self.indices.numel() and lanes <= self.last.numel()

    def fitting(self, lanes: int, width: int) -> Pages:
        """Return these pages, or others where such a table does not fit."""
        here = self.holds(lanes, width)
        return self if here else Pages.empty(lanes, width, self.last.device)

    def adapt(self, layer: LayerView, plan: Plan, tables: Tables) -> None:
        """See ``topkv.hooks.backend.Backend.adapt_page_table``; the pages are written along where
        rows have one query."""
        table, listing = tables.table, None
        if tables.queries is None and self.holds(*table.shape):
            ids = self.indices[: table.numel()].view(table.shape)
            listing = Listing(ids, 0, self.last[: len(table)])
        adapt_page_table(layer, plan, tables, "triton", listing)
        tables.attached = None if listing is None else self

    def take(self, tables: Tables, unit: int, queries: int = 1) -> Tensor:
        """Copy a table that ``adapt`` has not written here.

        Each of several ``queries`` of a row has lanes of its own: the first query, the second, and
        so on, as the heads of rows stand in memory.

        Returns:
            Tokens of each lane, int32.
        """
        if tables.attached is self:
            return tables.lengths
        table, lengths = tables.table, tables.lengths
        lanes, width = len(table) * queries, table.shape[1]
        several: dict[str, Any] = {}
        if tables.queries is not None:
            rows = len(tables.queries)
            several = {"QUERIES": queries, "LANES": len(table) // rows, "p_seen": self.seen}
            several["p_queries"] = tables.queries
        kernels.spread_kernel[(lanes, triton.cdiv(width, BLOCK))](
            *(table, lengths, self.indices, self.last, width, table.stride(0)),
            UNIT=unit,
            BLOCK=BLOCK,
            **several,
        )
        return self.seen[:lanes] if several else lengths


def make_natural(lse: Tensor, early: bool) -> None:
    """Turn log-sum-exps, contiguous, from base 2 to base e; ``early``: see ``topkv.ops.pdl``.

    The library's last kernel is not launched early, so the one here may be.
    """
    kernels.natural_kernel[(triton.cdiv(lse.numel(), BLOCK),)](
        *(lse, lse.numel()),
        FACTOR=LN2,
        PDL=early,
        BLOCK=BLOCK,
        num_warps=4,
        **pdl.options(early),
    )


def table_width(group: GroupShape, queries: int = 1) -> int:
    """Columns of the widest page table of a group: its selection and the units of the newest
    tokens, or all pages."""
    if group.residency != "sparse":
        return group.max_units
    return group.select + newest_units(queries, group.unit)


def refuse_capture(device: torch.device, lanes: int, width: int) -> None:
    """Refuse to plan while a CUDA graph is captured: planning is host work, which no graph holds.

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
