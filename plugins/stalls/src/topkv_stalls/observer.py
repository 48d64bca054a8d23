"""Times the loads of each sparse layer, in forwards and in replays of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from topkv import hookimpl
from topkv.decode.layers import LayerPath
from topkv.decode.loads import Loads
from topkv.hooks.observer import ForwardReport, ObserverSetup
from topkv.types import Plan, Selection
from topkv_stalls.clocks import Clock, DeviceClock, HostClock


class TimedLoads(Loads):
    """The loads of a layer, timed.

    Args:
        loads: loads of the layer.
        times: times of the layer, see ``clocks``.
        clock: clock of its device.
    """

    def __init__(self, loads: Loads, times: Tensor, clock: Clock) -> None:
        super().__init__(loads.path, loads.number)
        self._loads, self._times, self._clock = loads, times, clock

    def plan(self, selection: Selection) -> Plan:
        return self._loads.plan(selection)

    def load(self, plan: Plan) -> None:
        self._clock.begin(self._times)
        self._loads.load(plan)
        self._clock.end(self._times, plan.misses)


class Stalls:
    """The contract is ``topkv.hooks.observer``. A forward reads a
    clock twice more for each sparse layer, and is otherwise the same.

    Attributes:
        layers: numbers of the sparse layers, in order.
        times: int64 ``[L, 2]`` their times, see ``clocks``.
    """

    def __init__(self, setup: ObserverSetup) -> None:
        self._device = setup.config.device

    @hookimpl
    def bind_layers(self, layers: Sequence[LayerPath]) -> Callable[[], dict[int, float]]:
        clock: Clock = DeviceClock() if self._device.type == "cuda" else HostClock()
        self.layers = [path.view.layer for path in layers]
        self.times = torch.zeros((len(layers), 2), dtype=torch.int64, device=self._device)
        for path, times in zip(layers, self.times, strict=True):
            path.loads = TimedLoads(path.loads, times, clock)
        return self.milliseconds

    @hookimpl
    def before_forward(self, report: ForwardReport) -> None:
        """Do nothing: layers are timed as they load."""

    @hookimpl
    def after_forward(self, report: ForwardReport) -> None:
        """Do nothing: the device may still be at work."""

    def milliseconds(self) -> dict[int, float]:
        """Milliseconds by layer that the device spent in loads which had something to load.

        That is the time that steps waited for the link, of all requests since the coordinator was
        made, ended ones and dropped forwards included; it never falls. Single requests have no
        time of their own: their misses are loaded together. Synchronizes.
        """
        spent = self.times[:, 1].tolist()
        return {layer: each / 1e6 for layer, each in zip(self.layers, spent, strict=True)}
