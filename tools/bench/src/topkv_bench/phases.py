"""Time of a step by phase: topkv's phases beside everything else that the model does.

While a few steps are profiled, the calls of each layer's path stand in ranges named after their
phase. Host time of a phase is the time of its ranges. Device time is the time of the kernels that
were launched inside, which the profiler shows as ranges of the device too; a kernel outside of
them, of a captured graph say, is assigned by its name. The rest is the model's own.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from time import perf_counter
from typing import Any

import torch
from attrs import frozen
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from topkv import SparseCoordinator
from topkv.plugins import registry

PHASES = ("append", "select", "plan", "load", "adapt", "attend", "offload")
MODEL = "model"
"""Name of everything that is no phase: products, norms, the loop of ``generate``."""

_RANGE = "topkv."
_CALLS = {
    "transfer": {"append": "append", "plan": "plan", "load": "load"},
    "selector": {"select": "select"},
    "backend": {"adapt_page_table": "adapt", "attend": "attend"},
}
"""Calls of a step and their phases, by part of a layer's path."""

_CORE = {
    "append_kernel": "append",
    "encode_kernel": "append",
    "plan_kernel": "plan",
    "load_kernel": "load",
    "stall_begin_kernel": "load",
    "stall_end_kernel": "load",
    "offload_kernel": "offload",
    "adapt_kernel": "adapt",
    "regranulate_kernel": "select",
    "update_kernel": "select",
    "score_kernel": "select",
    "lanes_kernel": "select",
    "select_kernel": "select",
    "walk_kernel": "select",
    "drift_kernel": "select",
}
"""Phases of kernels of the core, of the observer ``stalls``, of the stage ``regranulate``, and of
a stated drift, which runs behind the algorithm."""


@frozen
class Span:
    """An event of the device: its name, and when it began and ended, in microseconds."""

    name: str
    start: float
    end: float


class Ranged:
    """Wrapper of an object, some of whose methods run in ranges."""

    def __init__(self, target: Any, calls: Mapping[str, str]) -> None:
        self._target = target
        for name, phase in calls.items():
            setattr(self, name, _ranged(getattr(target, name), phase))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def _ranged(call: Callable[..., Any], phase: str) -> Callable[..., Any]:
    @wraps(call)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with record_function(_RANGE + phase):
            return call(*args, **kwargs)

    return inside


class Profile:
    """Profiles steps between ``start`` and ``stop``, both between forwards.

    Args:
        coordinator: coordinator with the phases; None where there is none.
        device: where the model runs.
    """

    def __init__(self, coordinator: SparseCoordinator | None, device: torch.device) -> None:
        self.coordinator, self.device = coordinator, device
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._kept: list[tuple[Any, str, Any]] = []
        self._began: float | None = None
        self._seconds = 0.0

    def start(self) -> None:
        """Put the calls into ranges, and begin."""
        if self.coordinator is not None:
            for path in self.coordinator.layers:
                for part, calls in _CALLS.items():
                    if getattr(path, part) is not None:
                        self._replace(path, part, calls)
            transfers = self.coordinator.transfers
            self._kept.append((self.coordinator, "transfers", transfers))
            self.coordinator.transfers = [
                Ranged(each, {"offload": "offload"}) for each in transfers
            ]
        self._profile.start()
        self._began = perf_counter()

    def _replace(self, path: Any, part: str, calls: Mapping[str, str]) -> None:
        self._kept.append((path, part, getattr(path, part)))
        setattr(path, part, Ranged(getattr(path, part), calls))

    def stop(self) -> None:
        """End, and leave everything as it was. Nothing happens where nothing began."""
        if self._began is None:
            return
        self._seconds, self._began = perf_counter() - self._began, None
        self._profile.stop()
        for holder, name, value in self._kept:
            setattr(holder, name, value)
        self._kept.clear()

    def result(self, steps: int) -> dict[str, Any]:
        """Milliseconds a step: ``host_ms`` and, on a GPU, ``device_ms`` by phase, and ``wall_ms``.

        All three are under the profiler, which makes the host slower.
        """
        # Events without a duration are no work: marks of the profiler itself.
        events = [event for event in self._profile.events() or () if event.time_range.elapsed_us()]
        host = {
            phase: sum(
                event.time_range.elapsed_us()
                for event in events
                if event.name == _RANGE + phase and event.device_type == DeviceType.CPU
            )
            for phase in PHASES
        }
        host[MODEL] = self._seconds * 1e6 - sum(host.values())
        found = {"wall_ms": self._seconds * 1e3 / steps, "host_ms": _per_step(host, steps)}
        if self.device.type == "cuda":
            spans = [
                Span(event.name, event.time_range.start, event.time_range.end)
                for event in events
                if event.device_type == DeviceType.CUDA
            ]
            names = {} if self.coordinator is None else kernel_phases(self.coordinator)
            found["device_ms"] = _per_step(device_times(spans, names), steps)
        return found


def _per_step(microseconds: Mapping[str, float], steps: int) -> dict[str, float]:
    return {phase: time / 1e3 / steps for phase, time in microseconds.items()}


def device_times(spans: Iterable[Span], names: Mapping[str, str]) -> dict[str, float]:
    """Sum up the time of the kernels of each phase, in microseconds.

    Args:
        spans: kernels and copies, and the ranges among them, which do not overlap each other.
        names: phases of kernels that stand in no range, by name.
    """
    spans = sorted(spans, key=lambda span: span.start)
    ranges = [span for span in spans if span.name.startswith(_RANGE)]
    starts = [span.start for span in ranges]
    times = dict.fromkeys((*PHASES, MODEL), 0.0)
    for span in spans:
        if span.name.startswith(_RANGE):
            continue
        before = bisect_right(starts, span.start) - 1
        if before >= 0 and span.start < ranges[before].end:
            phase = ranges[before].name.removeprefix(_RANGE)
        else:
            phase = names.get(span.name, MODEL)
        times[phase] += span.end - span.start
    return times


def kernel_phases(coordinator: SparseCoordinator) -> dict[str, str]:
    """Return phases of Triton kernels by name: kernels of the core, and all in the packages of
    the plugins that select and attend. Kernels of libraries are not known by name."""
    config, names = coordinator.config, dict[str, str]()
    packages = {_package(path.backend): "attend" for path in coordinator.layers}
    packages |= {
        _package(path.algorithm): "select" for path in coordinator.layers if path.algorithm
    }
    entry = registry().get("topk", config.topk).entry
    factory = entry and entry.factories.get(config.impl)
    if factory:
        packages[factory.partition(":")[0].partition(".")[0]] = "select"
    packages.pop("topkv", None)
    for module, loaded in sorted(sys.modules.items()):
        phase = packages.get(module.partition(".")[0])
        if phase:
            names |= {
                value.__name__: phase
                for value in vars(loaded).values()
                if type(value).__module__.startswith("triton.runtime") and hasattr(value, "fn")
            }
    return names | _CORE


def _package(instance: Any) -> str:
    return type(instance).__module__.partition(".")[0]
