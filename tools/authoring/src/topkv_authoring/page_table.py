"""A plan becomes a page table: ``adapt_page_table`` of the backends that attend in place."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from topkv.types import LayerView, Plan, Tables


@frozen
class Listing:
    """A page table in the form of a library, written by the kernel that makes the table.

    Attributes:
        ids: int32 ``[N, at least W]``, columns adjacent: the table, of W columns.
        behind: value of the columns behind the last used one of a lane.
        last: int32 ``[N]`` length of a lane less ``(W - 1)`` units, for libraries that take W
            pages a lane and the tokens on the last one; mostly negative, as few lanes fill W
            pages.
    """

    ids: Tensor
    behind: int = -1
    last: Tensor | None = None


def adapt_page_table(
    layer: LayerView, plan: Plan, tables: Tables, impl: str, listing: Listing | None = None
) -> None:
    """Fill the page table; see ``topkv.hooks.backend.Backend.adapt_page_table``.

    Args:
        impl: ``"reference"`` or ``"triton"``.
        listing: written along with the table, if it is given.

    Raises:
        ValueError: the table has other columns than ``topkv.types.Tables`` says, or ``listing``
            has no room for it.
    """
    table = tables.table
    _check_columns(tables, plan)
    if listing is not None:
        rows, columns = listing.ids.shape
        if rows != len(table) or columns < table.shape[1]:
            raise ValueError(
                f"adapt_page_table: expected a listing of [{len(table)}, at least "
                f"{table.shape[1]}], got {[rows, columns]}"
            )
    if impl == "reference":
        _adapt(layer, plan, tables, listing)
        return
    from topkv_authoring import page_table_kernels

    page_table_kernels.adapt(layer, plan, tables, listing)


def _check_columns(tables: Tables, plan: Plan) -> None:
    """Refuse a table without columns for the units of the newest tokens beside the K of the plan;
    of one query a row it may lack one."""
    columns, selected = tables.table.shape[1], plan.slots.shape[1]
    fewest, most = (0, 1) if tables.queries is None else (1, columns)
    if not fewest <= columns - selected <= most:
        expected = "K or K + 1" if tables.queries is None else "more than K"
        raise ValueError(
            f"adapt_page_table: expected a table of {expected} columns with K = {selected}, got "
            f"{columns}"
        )


def _adapt(layer: LayerView, plan: Plan, tables: Tables, listing: Listing | None) -> None:
    """The reference, for all lanes at once."""
    group, table = layer.group, tables.table
    extra = table.shape[1] - plan.slots.shape[1]
    slot = layer.step.slots.repeat_interleave(group.lane_heads)
    length = layer.step.lengths.repeat_interleave(group.lane_heads)
    head = torch.arange(group.lane_heads, device=table.device).repeat(layer.step.batch)
    start = ((slot * group.lane_heads + head) * group.slots)[:, None]
    live = (slot >= 0) & (length > 0)
    count = plan.count.where(live, 0)
    column = torch.arange(table.shape[1], device=table.device)
    ids = start + torch.nn.functional.pad(plan.slots, (0, extra))
    used = column < count[:, None]
    ids = ids.where(used, 0)
    tokens = count * group.unit
    if extra:
        queries = 1 if tables.queries is None else tables.queries
        first = (layer.step.lengths - queries).clamp_min(0) // group.unit
        first = first.repeat_interleave(group.lane_heads)
        unit = first[:, None] + column - count[:, None]
        newest = ((length - 1).clamp_min(0) // group.unit)[:, None]
        at = (column >= count[:, None]) & (unit <= newest) & live[:, None]
        ring = group.buffer_slots + unit % group.ring_slots
        ids, used = torch.where(at, start + ring, ids), used | at
        tokens = (tokens + length - first * group.unit).where(live, 0)
    table.copy_(ids)
    tables.lengths.copy_(tokens)
    if listing is not None:
        listing.ids.fill_(listing.behind)
        listing.ids[:, : table.shape[1]] = torch.where(used, table, listing.behind)
        if listing.last is not None:
            listing.last.copy_(tokens - (table.shape[1] - 1) * group.unit)
