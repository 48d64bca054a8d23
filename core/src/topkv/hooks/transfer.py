"""Hook specs of a transfer engine: places of units, and copies between the tiers.

The core makes one instance per group:
``factory(setup)`` with a ``TransferSetup``; an entry names a factory for each implementation.

Entries on both tiers are alike, unless the entry of the engine states another host format
(``Capabilities.host_formats``) and the group has it (``GroupStore.host``). Then keys and values
that arrive are rounded already, what goes to the host is encoded and what comes from there
decoded, see ``topkv.hooks.host_format``: nothing is lost either way.

A row may append several tokens in a step, up to Q (``StepTensors.appended``): an engine states the
largest Q that it takes (``Capabilities.queries``) and gets the largest that will come
(``TransferSetup.max_queries``). The ring has room for all of them behind the open unit.

``append``, ``plan``, ``load`` and ``offload`` are hot. The others are cold. Every address is 64
bit. Padded rows (slot -1) touch nothing but their own lanes of the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from attrs import frozen
from torch import Tensor

from topkv.hooks.eviction import Eviction
from topkv.plugins.discovery import hookspec
from topkv.types import LayerView, Plan

if TYPE_CHECKING:
    from topkv.kv.store import GroupStore


@frozen
class TransferSetup:
    """The argument of a transfer engine's factory.

    Attributes:
        store: every tensor of the group.
        layers: the view of each of its layers, in order, which hooks are called with.
        eviction: the eviction policy.
        max_queries: most tokens Q that a row appends.
    """

    store: GroupStore
    layers: Sequence[LayerView]
    eviction: Eviction
    max_queries: int = 1


class Transfer(Protocol):
    """A transfer engine of one group."""

    @hookspec
    def append(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        """Write the new tokens of each decode row: to the ring (sparse layers) or to their pages.

        Args:
            layer: the layer; token i of row b stands at position
                ``lengths[b] - appended[b] + i``. Rows with ``appended == 0`` write nothing.
            k, v: ``[B, Q, Hkv, D]``, last dimension contiguous, rows at any stride; tokens from
                ``appended`` on are padding. A group of one plane stores k alone.
        """

    @hookspec
    def plan(self, layer: LayerView, ids: Tensor, limit: Tensor, out: Plan) -> None:
        """Resolve logical ids to slots, choose victims, list the misses.

        Drops -1, ids out of ``0 <= id < limit`` and all but the first of equal ids. Ids in the
        ring resolve to it. Hits are stamped before victims are chosen; no slot that is
        selected in this step is evicted in it. Afterwards the order of a lane is
        [stale | loaded in selection order | hits in their previous order] (policy ``lru``),
        victims coldest first. A lane whose buffer holds all of its units leaves at once. Hits and
        misses are added to ``GroupStore.counters``.

        Args:
            layer: the layer.
            ids: int32 ``[N, K]`` logical ids, anything at all.
            limit: int32 ``[B]`` selectable units of each row.
            out: written completely.
        """

    @hookspec
    def load(self, layer: LayerView, plan: Plan) -> None:
        """Copy the entries that ``plan`` missed from the host pool to their device slots."""

    @hookspec
    def offload(self) -> None:
        """Copy every unit that this step filled to the host: all layers, one masked launch.

        A row fills units ``(length - appended) // unit .. length // unit - 1``, none as a rule.
        A lane that is resident gets the unit in LRU slot ``unit`` as well.
        """

    @hookspec
    def store_chunk(
        self,
        layer: LayerView,
        slot: int,
        start: int,
        k: Tensor,
        v: Tensor,
        high: int,
        resident: bool,
    ) -> None:
        """Write a prefill chunk to its pages, and for sparse layers to ring and LRU slots. Cold.

        Called with another stream of its own as the current one.

        Args:
            layer: the layer.
            slot: request slot.
            start: position of the first token.
            k, v: ``[m, Hkv, D]``, heads and last dimension contiguous.
            high: the largest length that the ring has seen, this chunk included.
            resident: as in ``StepTensors.resident``. Units that the buffer holds are written there
                too; in a resident lane that fits, unit u goes to LRU slot u.
        """

    @hookspec
    def fetch(self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor) -> None:
        """Gather history from its pages. Cold.

        Called ahead of attention, with a stream of its own as the current one: what it reads was
        stored by earlier forwards, and k and v are free. Other kernels attend meanwhile, whose
        place it should not take.

        Args:
            layer: the layer.
            slot: request slot.
            start: first position, on a unit boundary.
            k, v: ``[n, Hkv, D]`` contiguous, filled with positions ``start .. start + n``.
        """

    @hookspec
    def flush(self, slot: int, length: int, high: int, resident: bool) -> None:
        """Move the open unit of a request to its host entries, in all layers. Cold.

        A resident lane gets it in LRU slot ``unit`` too, so that a prefill chunk can fill it up.

        Args:
            slot: request slot.
            length: tokens of the request.
            high, resident: as in ``store_chunk``.
        """

    @hookspec
    def restore(self, slot: int, length: int, resident: bool) -> None:
        """Forget ring and buffer of a request and fill them from the host. Cold.

        Args:
            slot: request slot.
            length: tokens of the request, all of them on the host.
            resident: fill LRU slot u with unit u too, if all closed units fit.
        """

    @hookspec
    def reset(self, slot: int) -> None:
        """Forget everything that the lanes of a slot hold. Cold.

        What they have counted stays: it is the request's, which may go on.
        """
