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
"""Groups start on multiples of this many bytes within a page."""


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
    """Strides of each group and the size of the whole pool: ``[page, layer, head, unit]`` from the
    outside in, all groups of a page adjacent.

    Args:
        groups: the groups that share the pool.
        num_pages: pages, the reserved page 0 included.

    Returns:
        One ``GroupLayout`` per group and the bytes of the pool, exactly.
    """
    spans = [_align(len(group.layers) * _strides(group)[0]) for group in groups]
    page, bases = sum(spans), (sum(spans[:place]) for place in range(len(spans)))
    layouts = [
        GroupLayout(base, page, *_strides(group))
        for base, group in zip(bases, groups, strict=True)
    ]
    return layouts, page * num_pages


def by_layer(group: GroupShape, num_pages: int) -> tuple[GroupLayout, int]:
    """As ``lay_out`` for a group of its own: ``[layer, page, head, unit]``, whose layers have each
    their pages adjacent."""
    page, head, unit = _strides(group)
    layout = GroupLayout(0, page, num_pages * page, head, unit)
    return layout, _align(len(group.layers) * num_pages * page)
