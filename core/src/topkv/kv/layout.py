"""Addresses of entries in the host pool: one formula for every layout.

``base + page * page_stride + layer * layer_stride + head * head_stride + unit * unit_stride``

is the offset of an entry in bytes, with ``layer`` counted within its group, ``head`` a lane head
and ``unit`` within the page. From the outside in, ``page_head`` is ``[page, layer, head, unit]``,
``page_first`` is ``[page, unit, layer, head]`` and ``layer_first`` ``[layer, page, head, unit]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from attrs import frozen

from topkv.types import GroupShape

LAYOUTS = ("page_head", "page_first", "layer_first")
ALIGNMENT = 256
"""Groups start on multiples of this many bytes within a page or region."""

_ORDER = {
    "page_head": ("page", "layer", "head", "unit"),
    "page_first": ("page", "unit", "layer", "head"),
    "layer_first": ("layer", "page", "head", "unit"),
}


@frozen
class GroupLayout:
    """Byte strides of one group; the address formula stands in the module docstring."""

    base: int
    page_stride: int
    layer_stride: int
    head_stride: int
    unit_stride: int

    def offset(self, page: int, layer: int, head: int, unit: int) -> int:
        return (
            self.base
            + page * self.page_stride
            + layer * self.layer_stride
            + head * self.head_stride
            + unit * self.unit_stride
        )


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def group_page_bytes(group: GroupShape) -> int:
    """Bytes of one page in all layers of a group."""
    return len(group.layers) * group.lane_heads * group.units_per_page * group.host_entry_bytes


def lay_out(
    groups: Sequence[GroupShape], layout: str, num_pages: int
) -> tuple[list[GroupLayout], int]:
    """Strides of each group and the size of the whole pool.

    Args:
        groups: the groups that share the pool.
        layout: one of ``LAYOUTS``.
        num_pages: pages, the reserved page 0 included.

    Returns:
        One ``GroupLayout`` per group and the bytes of the pool, exactly.
    """
    blob = sum(_align(group_page_bytes(group)) for group in groups)
    layouts = []
    base = 0
    for group in groups:
        sizes = {
            "page": num_pages,
            "layer": len(group.layers),
            "head": group.lane_heads,
            "unit": group.units_per_page,
        }
        order = _ORDER[layout]
        strides = {
            name: group.host_entry_bytes * prod(sizes[inner] for inner in order[place + 1 :])
            for place, name in enumerate(order)
        }
        if layout == "layer_first":
            span = _align(num_pages * group_page_bytes(group))
        else:
            strides["page"] = blob
            span = _align(group_page_bytes(group))
        layouts.append(
            GroupLayout(base, strides["page"], strides["layer"], strides["head"], strides["unit"])
        )
        base += span
    return layouts, base if layout == "layer_first" else blob * num_pages
