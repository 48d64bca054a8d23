"""Representation pools: tensors of the core that an algorithm keeps its representations in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from topkv.hooks.algorithm import RepresentationSpec
from topkv.kv.host_pool import POISON
from topkv.types import GroupShape


class RepresentationPools:
    """The pools of one group, ``[layers, keys, *shape]`` each.

    Grain unit and token are keyed by host id: they are copied, poisoned and shared with their
    page. Grain request is keyed by slot: copied by fork, reset at the end, never shared.

    Args:
        group: ``LoweredGroup.selected_as``.
        specs: one for each pool.
        num_pages: pages of the host pool.
        device: where the pools are.
        layers: layers of the group that keep something.
    """

    def __init__(
        self,
        group: GroupShape,
        specs: Sequence[RepresentationSpec],
        num_pages: int,
        device: torch.device,
        layers: Sequence[int],
    ) -> None:
        self.group, self.layers, self.specs = group, tuple(layers), tuple(specs)
        keys = {
            "unit": num_pages * group.units_per_page,
            "token": num_pages * group.page_tokens,
            "request": group.max_requests,
        }
        self.pools = {
            spec.name: torch.zeros(
                (len(self.layers), keys[spec.grain], *spec.shape), dtype=spec.dtype, device=device
            )
            for spec in self.specs
        }
        self._paged = [self.pages(spec) for spec in self.specs if spec.grain != "request"]
        self._slots = [self.pools[spec.name] for spec in self.specs if spec.grain == "request"]

    def of_layer(self, layer: int) -> dict[str, Tensor]:
        """Pools of a layer by name, ``[keys, *shape]``; empty for a layer that keeps nothing."""
        if layer not in self.layers:
            return {}
        index = self.layers.index(layer)
        return {name: pool[index] for name, pool in self.pools.items()}

    @property
    def bytes(self) -> int:
        return sum(pool.numel() * pool.element_size() for pool in self.pools.values())

    def pages(self, spec: RepresentationSpec) -> Tensor:
        """A page-keyed pool as ``[L, pages, keys per page, *shape]``."""
        per_page = self.group.units_per_page if spec.grain == "unit" else self.group.page_tokens
        pages: Tensor = self.pools[spec.name].unflatten(1, (-1, per_page))
        return pages

    def copy_page(self, source: int, target: int) -> None:
        for pages in self._paged:
            pages[:, target] = pages[:, source]

    def poison_pages(self, pages: list[int]) -> None:
        for pool in self._paged:
            for page in pages:
                pool[:, page].view(torch.uint8).fill_(POISON)

    def copy_slot(self, source: int, target: int) -> None:
        for pool in self._slots:
            pool[:, target] = pool[:, source]

    def reset_slot(self, slot: int) -> None:
        for pool in self._slots:
            pool[:, slot] = 0
