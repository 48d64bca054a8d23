"""Hook spec of an eviction policy.

``factory(setup)`` gives, for an ``EvictionSetup``, an object with ``new_position`` in plain torch
and an attribute ``new_position_kernel``, a ``triton.jit`` function of the same arguments and the
same formula. With ``impl="triton"`` the kernel is taken; the entry of a policy without one names a
factory for ``"reference"`` alone.

A policy answers for all C slots of the LRU buffer of a lane at once. The torch method gets tensors
of C elements. The kernel gets blocks that are padded to a power of two, so that their shape is not
C: it takes C from ``slots``. Places behind C are neither stale nor hit, and what a policy gives
for them is not used.

A policy may keep one int32 for each slot from step to step, a count or a mark, say: it then has
``new_state``, and ``new_state_kernel`` beside it. Scores of the selection have no place: what they
save is in ``benchmarks/results/eviction.log.xz``, and does not pay.
"""

from __future__ import annotations

from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor

from topkv.plugins.discovery import hookspec, optional


@frozen
class EvictionSetup:
    """The argument of the factory of an eviction policy.

    Attributes:
        device: where the plan runs.
    """

    device: torch.device


class Eviction(Protocol):
    """An eviction policy."""

    @hookspec
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
        """Return the position of each slot in the eviction order after the step; 0 goes first.

        Victims of the step are the ``misses`` stale slots of lowest ``stale_rank``; the i-th of
        them takes the i-th missing unit in selection order.

        Args:
            position: ``[C]`` the slot's position before the step.
            stale: bool ``[C]`` the slot was not selected in this step.
            stale_rank: ``[C]`` stale slots that stand before it.
            hit_rank: ``[C]`` selected slots that stand before it.
            stale_count: stale slots of the lane, a tensor of no dimension.
            misses: victims of the lane, likewise; never more than ``stale_count``.
            slots: C, an int; a ``tl.constexpr`` in the kernel.
            state: int32 ``[C]`` what ``new_state`` has just given; zeros without it.

        Returns:
            ``[C]`` a permutation of ``0 .. C - 1``. What is none loses slots or holds them twice,
            and attention reads other units than were selected: nothing on the way checks it.
        """

    @optional
    @hookspec
    def new_state(
        self, state: Tensor, stale: Tensor, stale_rank: Tensor, misses: Tensor, slots: int
    ) -> Tensor:
        """Return the state of each slot after the step.

        The core moves it to the slot's new position, and begins with zeros when a request begins
        or its buffer is filled anew. Lanes that hold all of their units are not asked.

        Args:
            state: int32 ``[C]`` of each slot before the step, 0 at first.
            stale, stale_rank, misses, slots: as in ``new_position``. A slot that is no victim and
                not stale was hit; a victim holds another unit from now on.

        Returns:
            int32 ``[C]``.
        """
