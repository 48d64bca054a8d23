"""The memory around one layer of an algorithm: pools, ring, page table, step tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import currently_in_test_context, reject
from torch import Tensor

from topkv.entries import Capabilities
from topkv.errors import ConfigError
from topkv.hooks.algorithm import AlgorithmSetup, RepresentationSpec
from topkv.hooks.topk import TopK, TopKSetup
from topkv.plugins import PluginRegistry
from topkv.types import GroupShape, IndexerShape, LayerView, ModelShape, StepTensors
from topkv_testing.algorithm.case import Case
from topkv_testing.kit import Subject
from topkv_testing.strategies import page_table

POISON = 93
UNWRITTEN = -77


def _poison(dtype: torch.dtype) -> float:
    return math.nan if dtype.is_floating_point else POISON


class BenchMemory:
    """An instance of the algorithm and what the core would allocate for it, poisoned.

    Args:
        subject: plugin and tier.
        case: shape, parameters and data.
        impl: ``"reference"`` or ``"triton"``.
        requests: request slots.
        pages_seed: of the page table.
        far: the pages are at the far end of pools of which the largest has more than 2**31
            elements.
        max_queries: most queries of a row.

    Attributes:
        params: of the instance.
    """

    def __init__(
        self,
        subject: Subject,
        case: Case,
        impl: str,
        requests: int,
        pages_seed: int,
        far: bool = False,
        max_queries: int = 1,
    ) -> None:
        self.subject, self.case = subject, case
        self.device, self.requests = subject.tier.device, requests
        try:
            self.params = subject.params(case.params)
            self.model, self.group, self.algorithm = made(
                subject, case, impl, requests, max_queries
            )
        except ConfigError:
            if currently_in_test_context():
                reject()  # a shape that the algorithm refuses on purpose; another one is drawn
            raise
        self.spec = self.algorithm.spec()
        pages = case.units // case.geometry.page_units
        skipped = self._far_pages() if far else 0
        self.page_table = page_table(requests, pages, pages_seed).to(self.device) + skipped
        # Page 0 is never leased, and two pages are free.
        last = skipped + requests * pages
        self.free_pages = [last + 1, last + 2]
        self.num_pages = last + 3
        self.pools = {spec.name: self._pool(spec) for spec in self.spec.representations}
        self._ints = torch.full((5, requests), UNWRITTEN, dtype=torch.int32, device=self.device)
        self.layer = self._layer()

    def _page_size(self, spec: RepresentationSpec) -> int:
        """Elements of a page of a pool; 0 where it is keyed by request."""
        keys = {"unit": self.group.units_per_page, "token": self.group.page_tokens, "request": 0}
        return keys[spec.grain] * math.prod(spec.shape)

    def _far_pages(self) -> int:
        """Pages that take up 2**31 elements of the largest pool; skips where there is no room."""
        sizes = {spec: self._page_size(spec) for spec in self.spec.representations}
        if not any(sizes.values()):
            pytest.skip(f"{self.subject.entry.name} has no pool that is keyed by pages")
        pages = -(-(2**31) // max(sizes.values()))
        need = sum(pages * size * spec.dtype.itemsize for spec, size in sizes.items())
        free = torch.cuda.mem_get_info(self.device)[0]
        if 2 * need > free:
            pytest.skip(f"pools of {need >> 30} GiB, and {free >> 30} GiB are free")
        return pages

    def _pool(self, spec: RepresentationSpec) -> Tensor:
        if spec.grain == "request":  # the core zeroes these when a request ends
            size: tuple[int, ...] = (self.requests, *spec.shape)
            return torch.zeros(size, dtype=spec.dtype, device=self.device)
        keys = self._page_size(spec) // math.prod(spec.shape)
        size = (self.num_pages * keys, *spec.shape)
        return torch.full(size, _poison(spec.dtype), dtype=spec.dtype, device=self.device)

    def _layer(self) -> LayerView:
        group = self.group
        # One ring slot more than there are: views are strided, as in a device buffer.
        shape = (self.requests, group.lane_heads, group.ring_slots + 1, *group.entry_shape)
        buffer = torch.full(shape, math.nan, dtype=group.dtype, device=self.device)[:, :, 1:]
        k, v = buffer[:, :, :, :, 0], buffer[:, :, :, :, -1]
        absent = torch.full(
            (group.max_lanes, group.max_units), -1, dtype=torch.int32, device=self.device
        )
        return LayerView(0, 0, group, self._steps(0), k, v, self.pools, absent)

    def keep(self, slot: int, seed: int) -> None:
        """Mark about half of the units of a request, other ones in each lane, as being in the LRU
        buffer; before, none is.
        """
        group, held = self.group, self.layer.held.unflatten(0, (self.requests, -1))
        generator = torch.Generator().manual_seed(seed)
        there = torch.rand(held[slot].shape, generator=generator) < 0.5
        slots = torch.arange(group.max_units, dtype=torch.int32) % group.buffer_slots
        held[slot] = torch.where(there, slots, -1).to(self.device)

    def _steps(self, count: int) -> StepTensors:
        slots, held, high, appended, resident = self._ints[:, :count]
        return StepTensors(slots, held, high, appended, resident, self.page_table)

    def copy_page(self, slot: int, page: int, to_slot: int, poison: bool = False) -> None:
        """Copy page ``page`` of ``slot`` to a free host page, which ``to_slot`` gets for it."""
        source, target = int(self.page_table[slot, page]), self.free_pages.pop()
        for pages in self._pages(self.pools).values():
            pages[target] = pages[source]
            if poison:
                pages[source] = _poison(pages.dtype)
        self.page_table[to_slot, page] = target

    def _pages(self, pools: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Pools that are keyed by pages, as ``[host pages, keys per page, *shape]``."""
        grain = {spec.name: spec.grain for spec in self.spec.representations}
        return {
            name: pool.unflatten(0, (self.num_pages, -1))
            for name, pool in pools.items()
            if grain[name] != "request"
        }


def made(
    subject: Subject, case: Case, impl: str, requests: int, max_queries: int = 1
) -> tuple[ModelShape, GroupShape, Any]:
    """The model and the group of a case, and an instance of the algorithm for them.

    Raises:
        ConfigError: the algorithm refuses them.
    """
    model, group = _shapes(subject.entry.capabilities, case, requests)
    device = subject.tier.device

    def topk(rows: int, columns: int, select: int) -> TopK:
        setup = TopKSetup(rows, columns, select, device)
        made: TopK = PluginRegistry([]).create("topk", "radix", setup, "triton")
        return made

    setup = AlgorithmSetup(model, group, subject.params(case.params), device, topk, max_queries)
    return model, group, subject.make(setup, impl)


def _model(stated: Capabilities, case: Case) -> ModelShape:
    g = case.geometry
    if not case.index:
        return ModelShape(1, g.kv_heads * g.group, g.kv_heads, g.dim, g.dtype, g.dim**-0.5)
    # Sizes of what is stored and of the index differ, so that one does not pass for the other.
    if case.weights is None:
        heads, dim = 2 * g.kv_heads, (stated.head_dims or (g.dim + 8,))[0]
        own = IndexerShape(g.kv_heads * g.group, g.dim)
        return ModelShape(1, heads, g.kv_heads, dim, g.dtype, g.dim**-0.5, indexer=own)
    heads = min(g.group + 1, stated.max_group or g.group + 1)
    dim = (stated.head_dims or (g.dim + 8,))[0]
    indexer = IndexerShape(g.group, g.dim)
    return ModelShape(1, heads, 1, dim, g.dtype, dim**-0.5, "mla", dim - 4, indexer)


def _shapes(stated: Capabilities, case: Case, requests: int) -> tuple[ModelShape, GroupShape]:
    """The model and the group of a case, within what an entry states."""
    g, model = case.geometry, _model(stated, case)
    group = GroupShape(
        layers=(0,),
        unit=g.unit,
        lane_heads=g.lane_heads,
        heads_per_lane=g.kv_heads // g.lane_heads,
        head_dim=model.head_dim,
        dtype=g.dtype,
        page_tokens=g.page_tokens,
        max_requests=requests,
        max_units=case.units,
        select=case.select,
        buffer_slots=2 * case.select,
        ring_slots=case.ring,
        planes=1 if model.attention == "mla" else 2,
    )
    return model, group


def same_bits(first: Any, second: Any) -> bool:
    """Return True if two tensors, or two dicts of tensors, hold the same bytes."""
    if isinstance(first, Tensor):
        return torch.equal(first.view(torch.uint8), second.view(torch.uint8))
    return all(same_bits(first[name], second[name]) for name in first)
