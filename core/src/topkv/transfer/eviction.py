"""The default eviction policy. The contract stands in ``topkv.hooks.eviction``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from topkv.errors import PluginError
from topkv.hooks.eviction import EvictionSetup
from topkv.plugins.contract import has_hook
from topkv.plugins.discovery import hookimpl


class LeastRecentlyUsed:
    """Evicts the units that were selected longest ago.

    Afterwards the order is [stale | loaded in selection order | hits in their previous order].
    """

    def __init__(self, setup: EvictionSetup) -> None:
        """Ignore the setup: nothing depends on it."""

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
        state: Tensor,
    ) -> Tensor:
        loaded = stale & (stale_rank < misses)
        kept = torch.where(stale, stale_rank - misses, stale_count + hit_rank)
        return torch.where(loaded, stale_count - misses + stale_rank, kept)

    @property
    def new_position_kernel(self) -> object:
        """Formula of ``new_position`` as a ``triton.jit`` function, for the plan in Triton."""
        from topkv.transfer.kernels import lru_new_position

        return lru_new_position


def require_kernel(policy: Any, who: str) -> None:
    """Refuse a policy that kernels cannot call.

    Args:
        policy: the object that a factory of the kind ``eviction`` made.
        who: package and plugin, for the error.

    Raises:
        PluginError: it has no ``new_position_kernel``, or no ``new_state_kernel`` beside a
            ``new_state``.
    """
    hooks = ["new_position", *["new_state"] * has_hook(policy, "new_state")]
    kernels = {hook: f"{hook}_kernel" for hook in hooks}
    lacking = {hook: name for hook, name in kernels.items() if not hasattr(policy, name)}
    if lacking:
        raise PluginError(
            f"{who} has no kernel",
            [
                f"with impl 'triton' a policy needs {kernel}, a triton.jit function of the "
                f"arguments of {hook}: add it, or set impl to 'reference'; the entry of a policy "
                "that is to stay without names a factory for 'reference' alone"
                for hook, kernel in lacking.items()
            ],
        )
