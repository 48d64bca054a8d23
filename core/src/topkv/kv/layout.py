"""Addresses of entries in host memory, and of pages on the device: one formula.

``base + page * page_stride + layer * layer_stride + head * head_stride + unit * unit_stride``

is the offset of an entry in bytes, with ``layer`` counted within its group, ``head`` a lane head
and ``unit`` within the page.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from topkv.types import GroupShape

ALIGNMENT = 256
"""Groups start on multiples of this many bytes."""


@frozen
class GroupLayout:
    """Byte strides of one group; the address formula stands in the module docstring."""

    base: int
    page_stride: int
    layer_stride: int
    head_stride: int
    unit_stride: int


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _strides(group: GroupShape) -> tuple[int, int, int]:
    """Bytes of a page in one layer of a group, of a head in it, and of an entry."""
    head = group.units_per_page * group.host_entry_bytes
    return group.lane_heads * head, head, group.host_entry_bytes


def lay_out(groups: Sequence[GroupShape], num_pages: int) -> tuple[list[GroupLayout], int]:
    """Strides of each group and the size of a pool that they share: ``[layer, page, head, unit]``
    from the outside in, one group behind the other.

    The pages of a layer are adjacent because a load reads of one layer, and rows without
    neighbours come the more slowly the larger the range is that they are read from.

    Args:
        groups: the groups that share the pool.
        num_pages: pages, the reserved page 0 included.

    Returns:
        One ``GroupLayout`` per group and the bytes of the pool, exactly.
    """
    layouts, size = [], 0
    for group in groups:
        page, head, unit = _strides(group)
        layouts.append(GroupLayout(size, page, num_pages * page, head, unit))
        size += _align(len(group.layers) * num_pages * page)
    return layouts, size
