"""A plan becomes a page table: ``adapt_page_table`` of the backends that attend in place."""

from __future__ import annotations

import torch
from torch import Tensor

from topkv.types import LayerView, Plan


def adapt_page_table(
    layer: LayerView,
    plan: Plan,
    table: Tensor,
    lengths: Tensor,
    impl: str,
    listed: Tensor | None = None,
) -> None:
    """See ``topkv.hooks.backend.adapt_page_table``.

    Args:
        impl: ``"reference"`` or ``"triton"``.
        listed: int32 ``[N, at least W]`` that becomes the table with -1 behind the last used
            column, for libraries that take lists without lengths; columns adjacent.

    Raises:
        ValueError: ``table`` has neither K nor K + 1 columns, or ``listed`` has no room for it.
    """
    tail = _has_tail(table, plan)
    if listed is not None and (len(listed) != len(table) or listed.shape[1] < table.shape[1]):
        raise ValueError(
            f"adapt_page_table: expected listed [{len(table)}, at least {table.shape[1]}], got "
            f"{list(listed.shape)}"
        )
    if impl == "reference":
        _adapt(layer, plan, table, lengths, tail, listed)
        return
    from topkv.ops import page_table_kernels

    page_table_kernels.adapt(layer, plan, table, lengths, tail, listed)


def _has_tail(table: Tensor, plan: Plan) -> bool:
    """Whether ``table`` has a column for the tail unit beside the K of the plan."""
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
    listed: Tensor | None,
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
    if listed is not None:
        used = column < (count + (live if tail else 0))[:, None]
        listed.fill_(-1)
        listed[:, : table.shape[1]] = torch.where(used, table, -1)
