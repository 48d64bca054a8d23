"""Places of the bytes of a page: a run of the host pool for each layer, and rows of other tensors.

The host pool is read and written in place, by any thread. Pages of resident layers and
representations are on the device in many small pieces; the thread that runs forwards copies them
to and from rows of host memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import topkv
from topkv.config import LoweredConfig
from topkv.memory.manager import SparseKVCacheManager
from topkv.parameters import values
from topkv_prefixes.objects import HEADER


def layout_of(config: LoweredConfig, manager: SparseKVCacheManager) -> dict[str, Any]:
    """Everything but weights that a request's tensors depend on: geometry, formats, algorithms."""
    model = config.model
    groups = [
        {
            "layers": list(group.shape.layers),
            "algorithm": group.algorithm,
            "params": {name: repr(value) for name, value in sorted(values(group.params).items())},
            "stages": [repr(stage) for stage in group.stages],
            "budget": group.budget,
            "selecting": list(group.selecting),
            "residency": group.shape.residency,
            "entry": [group.shape.lane_heads, *group.shape.entry_shape],
            "host_entry_bytes": group.shape.host_entry_bytes,
            "pools": {
                spec.name: [spec.grain, *spec.shape, str(spec.dtype)] for spec in pools.specs
            },
        }
        for group, pools in zip(config.groups, manager.representations, strict=True)
    ]
    return {
        "heads": [model.num_heads, model.num_kv_heads, model.head_dim],
        "dtype": str(model.dtype),
        "page_tokens": config.page_tokens,
        "kv_format": config.kv_format,
        "host_format": config.host_format,
        "groups": groups,
    }


def fingerprint_of(config: LoweredConfig, manager: SparseKVCacheManager, keep: str) -> bytes:
    """Hash all that the bytes of a page depend on but tokens, weights and tenants.

    ``keep`` is the parameter of ``prefixes``: which pages are found changes what others attend.
    Files that parameters of algorithms and stages name count by their content.
    """
    files = [
        hashlib.sha256(Path(value).read_bytes()).hexdigest()
        for group in config.groups
        for params in (group.params, *(stage.params for stage in group.stages))
        for _, value in sorted(values(params).items())
        if isinstance(value, str) and Path(value).is_file()
    ]
    reported = {
        "topkv": topkv.__version__,
        "layout": layout_of(config, manager),
        "model": repr(config.model),
        "prefix_cache": keep,
        "files": files,
    }
    return hashlib.sha256(json.dumps(reported, sort_keys=True).encode()).digest()


class PagePlaces:
    """Places of the bytes of pages.

    Args:
        manager: the memory of both tiers.

    Attributes:
        pool: uint8, the host pool.
        staged_bytes: bytes of a page outside of the host pool.
        object_bytes: bytes of a stored page, its header included.
    """

    def __init__(self, manager: SparseKVCacheManager) -> None:
        host, self._device = manager.host, manager.device
        self.pool: np.ndarray = host.bytes.numpy()
        on_host = [group for group in manager.groups if group.residency != "resident"]
        # First page, and bytes of a page, of each layer there.
        self._layers = [
            (layout.base + layer * layout.layer_stride, layout.page_stride)
            for group, layout in zip(on_host, host.layouts, strict=True)
            for layer in range(len(group.layers))
        ]
        # With the pages in front.
        self._others = [
            store.entries for store in manager.stores if store.group.residency == "resident"
        ] + [
            pools.pages(spec).transpose(0, 1)
            for pools in manager.representations
            for spec in pools.specs
            if spec.grain != "request"
        ]
        self._others = [tensor for tensor in self._others if tensor[0].numel()]
        self._sizes = [tensor[0].nbytes for tensor in self._others]
        self.staged_bytes = sum(self._sizes)
        self.object_bytes: int = HEADER + sum(size for _, size in self._layers) + self.staged_bytes

    def rows(self, count: int, pinned: bool = False) -> Tensor:
        """Make memory for headers and staged parts, uint8 ``[count, HEADER + staged_bytes]``.

        Args:
            count: number of pages.
            pinned: for ``unstage``, so that the host need not wait for the device.
        """
        pinned &= self._device.type == "cuda"
        size = (count, HEADER + self.staged_bytes)
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)

    def place(self, page: int, row: np.ndarray) -> list[np.ndarray]:
        """Return all parts of a page: its header in a row, the layers of the host pool one by one,
        the rest of the row."""
        starts = [(first + page * size, size) for first, size in self._layers]
        inside = [self.pool[start : start + size] for start, size in starts]
        parts = [row[:HEADER], *inside, row[HEADER:]]
        return [part for part in parts if len(part)]

    def stage(self, pages: Sequence[int], rows: Tensor) -> None:
        """Copy the parts outside of the host pool to rows. Waits for the device."""
        index = torch.tensor(pages, device=self._device)
        at = HEADER
        for tensor, size in zip(self._others, self._sizes, strict=True):
            block = tensor[index].reshape(len(pages), -1).contiguous()
            rows[:, at : at + size] = block.view(torch.uint8).cpu()
            at += size

    def unstage(self, pages: Sequence[int], rows: Tensor) -> None:
        """Copy these parts back from rows, behind the current stream's work; nobody waits."""
        index, at = torch.tensor(pages), HEADER
        if rows.is_pinned():
            index = index.pin_memory()
        index, rows = (each.to(self._device, non_blocking=True) for each in (index, rows))
        for tensor, size in zip(self._others, self._sizes, strict=True):
            # A copy, for a view of another dtype has to begin at a multiple of its size.
            block = rows[:, at : at + size].clone(memory_format=torch.contiguous_format)
            tensor[index] = block.view(tensor.dtype).view(len(pages), *tensor.shape[1:])
            at += size
