"""Hook spec of an eviction policy.

``factory()`` gives an object with ``new_position`` in plain torch and an attribute
``new_position_kernel``, a ``triton.jit`` function of the same arguments and the same formula. A
group of ``impl="triton"`` takes the kernel; a policy without one states
``Capabilities(impls=("reference",))``.

A policy answers for all C slots of the LRU buffer of a lane at once. The torch method gets tensors
of C elements. The kernel gets blocks that are padded to a power of two, so that their shape is not
C: it takes C from ``slots``. Lanes behind C are neither stale nor hit, and what a policy gives for
them is not used.

``topkv.testing.evictions.EvictionTests`` tests a policy.
"""

from __future__ import annotations

from torch import Tensor

from topkv.hooks.registry import hookspec


@hookspec(firstresult=True)
def new_position(  # type: ignore[empty-body]
    position: Tensor,
    stale: Tensor,
    stale_rank: Tensor,
    hit_rank: Tensor,
    stale_count: Tensor,
    misses: Tensor,
    slots: int,
) -> Tensor:
    """Where each slot stands in the eviction order after the step. Position 0 is evicted first.

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

    Returns:
        ``[C]`` a permutation of ``0 .. C - 1``. What is none loses slots or holds them twice, and
        attention reads other units than were selected: nothing on the way checks it.
    """
