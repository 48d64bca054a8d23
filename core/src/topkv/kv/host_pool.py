"""The host tier: one pool of pages for all layers and requests, with reference counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from topkv.errors import HostMemoryError, RequestError
from topkv.kv.host_memory import HostMemory
from topkv.kv.layout import GroupLayout, lay_out
from topkv.types import GroupShape

POISON = 0xFF
"""Byte of poisoned memory: all bytes 0xFF are NaN in fp16, bf16 and fp32 alike."""


class PageAllocator:
    """Page ids ``1 .. num_pages - 1`` and their reference counts. Page 0 is never leased.

    ``free + used == num_pages - 1`` after every call.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.references = np.zeros(num_pages, dtype=np.int32)
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.num_pages - 1 - self.free

    def lease(self, count: int) -> list[int]:
        """Take ``count`` pages with one reference each, all of them or none.

        Raises:
            HostMemoryError: fewer than ``count`` pages are free.
        """
        if count > self.free:
            raise HostMemoryError(
                f"{count} pages of the host pool are needed and {self.free} of "
                f"{self.num_pages - 1} are free; end requests, shorten the prompt or raise "
                "max_tokens"
            )
        pages = [self._free.pop() for _ in range(count)]
        self.references[pages] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each page, or to none.

        Raises:
            RequestError: a page is not leased.
        """
        pages = list(pages)
        for page in pages:
            self._check_shareable(page)
        np.add.at(self.references, pages, 1)

    def withdraw(self, pages: Iterable[int]) -> None:
        """Let nobody find pages that are about to be written. Here nobody does."""

    def release(self, pages: Iterable[int]) -> list[int]:
        """Drop one reference of each page and return those that are free now."""
        freed = []
        for page in pages:
            self._check_leased(page)
            self.references[page] -= 1
            if self.references[page] == 0 and self._give_back(page):
                freed.append(page)
        return freed

    def _give_back(self, page: int) -> bool:
        """Let go of a page without holders. Returns True if it is free now."""
        self._free.append(page)
        return True

    def shared(self, page: int) -> bool:
        return bool(self.references[page] > 1)

    def _check_shareable(self, page: int) -> None:
        self._check_leased(page)

    def _check_leased(self, page: int) -> None:
        if not 0 < page < self.num_pages or self.references[page] == 0:
            raise RequestError(f"page {page} is not leased, so it cannot be shared or released")


class HostKVPool(PageAllocator):
    """All pages of all groups that keep their entries in host memory: ``bytes``, one uint8 tensor.

    Args:
        groups: the groups, in the order in which they stand in the pool.
        num_pages: pages, page 0 included.
        device: the device that attends; a GPU gets mapped, registered memory, ``meta`` none.
        file: descriptor of a file that holds the pool; None for memory of this process alone.
    """

    def __init__(
        self,
        groups: Sequence[GroupShape],
        num_pages: int,
        device: torch.device,
        file: int | None = None,
    ) -> None:
        super().__init__(num_pages)
        self.layouts, self.size = lay_out(groups, num_pages)
        self.memory = HostMemory(self.size, device, file)
        self.bytes = self.memory.bytes

    def close(self) -> None:
        self.memory.close()


def entry_view(pool: Tensor, group: GroupShape, strides: GroupLayout, num_pages: int) -> Tensor:
    """Entries of a group as ``[pages, layers, lane_heads, units_per_page, *entry_shape]``; coded
    ones as uint8 ``[..., coded_bytes]``.
    """
    dtype, shape, inner = group.dtype, [*group.entry_shape], [1]
    if group.coded_bytes:
        dtype, shape = torch.uint8, [group.coded_bytes]
    for size in shape[:0:-1]:
        inner.insert(0, size * inner[0])
    size = dtype.itemsize
    flat = pool[: pool.numel() // size * size].view(dtype)
    outer = (strides.page_stride, strides.layer_stride, strides.head_stride, strides.unit_stride)
    places = (num_pages, len(group.layers), group.lane_heads, group.units_per_page)
    return torch.as_strided(
        flat,
        (*places, *shape),
        (*(stride // size for stride in outer), *inner),
        strides.base // size,
    )
