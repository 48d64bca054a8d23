"""Plans and loads of a layer's selected units: in the layer's turn, or ahead of it.

A layer that selects for itself plans and loads behind its selection. Layers that share it attend
to the same units, so at the same moment it is known what they will miss: that is planned and
copied at once, on a stream beside the one that attends, and each of them waits for its own.
Nothing is guessed, and no bit of an output changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from topkv.config import LoweredConfig
from topkv.decode.lanes import LaneBuffers
from topkv.decode.streams import SideStream
from topkv.hooks.transfer import Transfer
from topkv.types import LayerView, Plan, Selection


class Bound(Protocol):
    """Attributes of ``topkv.decode.layers.LayerPath`` that this module reads."""

    view: LayerView
    transfer: Transfer
    lanes: LaneBuffers
    loads: Loads


class Loads:
    """Plans and loads of one sparse layer, in its turn.

    Args:
        path: path of the layer.
        number: number of its own plan among ``LaneBuffers.plans``.
    """

    def __init__(self, path: Bound, number: int = 0) -> None:
        self.path, self.number = path, number

    def plan(self, selection: Selection) -> Plan:
        """Find the places of selected units, and which have to be loaded. Hot."""
        path, lanes = self.path, self.path.lanes
        found = lanes.plans[self.number]
        path.transfer.plan(path.view, selection.ids, lanes.limit, found)
        return found

    def load(self, plan: Plan) -> None:
        """Load the missing units of a plan, before all that is queued behind. Hot."""
        self.path.transfer.load(self.path.view, plan)


class LoadsAhead(Loads):
    """Loads of a layer that shares a selection: misses are on their way when its turn comes.

    Args:
        path, number: as of ``Loads``.
        side: the stream that copies.
    """

    def __init__(self, path: Bound, number: int, side: SideStream) -> None:
        super().__init__(path, number)
        self._side, self._done = side, side.event()

    def begin(self, selection: Selection) -> None:
        """Plan and queue the copies, on ``side``. Hot."""
        super().load(super().plan(selection))
        self._side.mark(self._done)

    def plan(self, selection: Selection) -> Plan:
        """Return the plan that ``begin`` has made of the same selection."""
        return self.path.lanes.plans[self.number]

    def load(self, plan: Plan) -> None:
        self._side.join(self._done)


class SharedLoads(Loads):
    """Loads of a layer that selects for itself and for others.

    Args:
        path: path of the layer.
        others: loads of the layers that share its selection.
        side: the stream that copies their misses. All plans of a group write the same stamps, so
            the next layer that selects waits for all of them.
    """

    def __init__(self, path: Bound, others: Sequence[LoadsAhead], side: SideStream) -> None:
        super().__init__(path)
        self._others, self._side = others, side

    def plan(self, selection: Selection) -> Plan:
        self._selection = selection
        return super().plan(selection)

    def load(self, plan: Plan) -> None:
        super().load(plan)
        with self._side.behind():  # its own misses have the link first
            for each in self._others:
                each.begin(self._selection)


def bind_loads(config: LoweredConfig, paths: Sequence[Bound]) -> None:
    """Give ``loads`` to the layers of a group.

    Args:
        config: says which of them share a selection.
        paths: paths of its layers, in order.
    """
    lanes = paths[0].lanes
    of = {path.view.layer: path for path in paths}
    for first, *others in config.groups[lanes.index].turns:
        ahead = [LoadsAhead(of[layer], n, lanes.side) for n, layer in enumerate(others, start=1)]
        of[first].loads = SharedLoads(of[first], ahead, lanes.side) if ahead else Loads(of[first])
        for each in ahead:
            each.path.loads = each
