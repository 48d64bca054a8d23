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
from topkv.hooks.transfer import Transfer
from topkv.types import LayerView, Plan, Selection


class Bound(Protocol):
    """Attributes of ``topkv.decode.layers.LayerPath`` that this module reads."""

    view: LayerView
    transfer: Transfer
    lanes: LaneBuffers
    loads: Loads


class Loads:
    """Plans and loads of one sparse layer.

    Args:
        path: path of the layer.
        number: number of its own plan among ``LaneBuffers.plans``: 0 where it selects for itself,
            else its place among the layers that share.
        others: loads of the layers that share its selection, which begin behind its own.
    """

    def __init__(self, path: Bound, number: int = 0, others: Sequence[Loads] = ()) -> None:
        self.path, self.number, self._others = path, number, others
        self._side = path.lanes.side
        self._done = self._side.event() if number else None

    def plan(self, selection: Selection) -> Plan:
        """Find the places of selected units, and which have to be loaded. Hot."""
        if self.number:  # ``begin`` has planned the same selection
            return self.path.lanes.plans[self.number]
        self._selection = selection
        return self._plan(selection)

    def load(self, plan: Plan) -> None:
        """Load the missing units of a plan, before all that is queued behind. Hot."""
        if self.number:
            self._side.join(self._done)
            return
        self.path.transfer.load(self.path.view, plan)
        if self._others:
            # Its own misses have the link first. All plans of a group write the same stamps, so
            # the next layer that selects waits for all of them.
            with self._side.behind():
                for each in self._others:
                    each.begin(self._selection)

    def begin(self, selection: Selection) -> None:
        """Plan, and queue the copies for a layer that shares, on the stream beside. Hot."""
        self.path.transfer.load(self.path.view, self._plan(selection))
        self._side.mark(self._done)

    def _plan(self, selection: Selection) -> Plan:
        path, lanes = self.path, self.path.lanes
        found = lanes.plans[self.number]
        path.transfer.plan(path.view, selection.ids, lanes.limit, found)
        return found


def bind_loads(config: LoweredConfig, paths: Sequence[Bound]) -> None:
    """Give ``loads`` to the layers of a group.

    Args:
        config: says which of them share a selection.
        paths: paths of its layers, in order.
    """
    of = {path.view.layer: path for path in paths}
    for first, *others in config.groups[paths[0].lanes.index].turns:
        ahead = [Loads(of[layer], number) for number, layer in enumerate(others, start=1)]
        of[first].loads = Loads(of[first], others=ahead)
        for each in ahead:
            each.path.loads = each
