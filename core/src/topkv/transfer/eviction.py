"""The default eviction policy. The contract stands in ``topkv.hooks.eviction``."""

from __future__ import annotations

import torch
from torch import Tensor

from topkv.hooks.registry import hookimpl


class LeastRecentlyUsed:
    """Evict what was selected longest ago.

    Afterwards the order is [stale | loaded in selection order | hits in their previous order].
    """

    @hookimpl
    def new_position(
        self,
        position: Tensor,
        stale: Tensor,
        stale_rank: Tensor,
        hit_rank: Tensor,
        stale_count: Tensor,
        misses: Tensor,
        slots: int,
    ) -> Tensor:
        loaded = stale & (stale_rank < misses)
        kept = torch.where(stale, stale_rank - misses, stale_count + hit_rank)
        return torch.where(loaded, stale_count - misses + stale_rank, kept)

    @property
    def new_position_kernel(self) -> object:
        """The same formula for the Triton plan."""
        from topkv.transfer.kernels import lru_new_position

        return lru_new_position
