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
        ValueError: the table has neither K nor K + 1 columns, or ``listing`` has no room for it.
    """
    table, lengths = tables.table, tables.lengths
    tail = _has_tail(table, plan)
    if listing is not None:
        rows, columns = listing.ids.shape
        if rows != len(table) or columns < table.shape[1]:
            raise ValueError(
                f"adapt_page_table: expected a listing of [{len(table)}, at least "
                f"{table.shape[1]}], got {[rows, columns]}"
            )
    if impl == "reference":
        _adapt(layer, plan, table, lengths, tail, listing)
        return
    from topkv_authoring import page_table_kernels

    page_table_kernels.adapt(layer, plan, table, lengths, tail, listing)


def _has_tail(table: Tensor, plan: Plan) -> bool:
    """Return True if ``table`` has a column for the tail unit beside the K of the plan."""
    extra = table.shape[1] - plan.slots.shape[1]
    if extra not in (0, 1):
        raise ValueError(
            f"adapt_page_table: expected a table of K or K + 1 columns with K = "
            f"{plan.slots.shape[1]}, got {table.shape[1]}"
        )
    return extra == 1


def _adapt(
    layer: LayerView,
    plan: Plan,
    table: Tensor,
    lengths: Tensor,
    tail: bool,
    listing: Listing | None,
) -> None:
    """The reference, for all lanes at once."""
    group = layer.group
    slot = layer.step.slots.repeat_interleave(group.lane_heads)
    length = layer.step.lengths.repeat_interleave(group.lane_heads)
    head = torch.arange(group.lane_heads, device=table.device).repeat(layer.step.batch)
    start = ((slot * group.lane_heads + head) * group.slots)[:, None]
    live = (slot >= 0) & (length > 0)
    count = plan.count.where(live, 0)
    column = torch.arange(table.shape[1], device=table.device)
    ids = start + torch.nn.functional.pad(plan.slots, (0, int(tail)))
    ids = ids.where(column < count[:, None], 0)
    tokens = count * group.unit
    if tail:
        newest = (length - 1).clamp_min(0)
        ring = group.buffer_slots + newest // group.unit % group.ring_slots
        at = (column == count[:, None]) & live[:, None]
        ids = torch.where(at, start + ring[:, None], ids)
        tokens = (tokens + newest % group.unit + 1).where(live, 0)
    table.copy_(ids)
    lengths.copy_(tokens)
    if listing is not None:
        used = column < (count + (live if tail else 0))[:, None]
        listing.ids.fill_(listing.behind)
        listing.ids[:, : table.shape[1]] = torch.where(used, table, listing.behind)
        if listing.last is not None:
            listing.last.copy_(tokens - (table.shape[1] - 1) * group.unit)
