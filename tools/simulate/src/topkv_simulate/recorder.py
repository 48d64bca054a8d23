"""Recorder of what a coordinator selects, which makes traces of ``topkv_simulate.trace``.

The transfer engine of each sparse group is wrapped: every selection goes through its ``plan``, and
everything else that changes a buffer through its other hooks. The core knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

import topkv
from topkv.coordinator import SparseCoordinator
from topkv.errors import CapabilityError, RequestError
from topkv.parameters import values
from topkv.types import LayerView, Plan, StepTensors
from topkv_simulate.trace import KIND, ROW, Geometry, Group, Trace

CAPTURED = "recording waits for the device in every layer, which a CUDA graph cannot; run eagerly"


@contextmanager
def recording(coordinator: SparseCoordinator) -> Iterator[Recorder]:
    """Record everything that requests do meanwhile; eager forwards only, and slow ones.

    Of a model that ``topkv.attach`` has attached, with ``capture: off`` on a GPU, the coordinator
    is ``handle.coordinator``::

        with recording(handle.coordinator) as recorder:
            model.generate(**inputs)
        recorder.trace().save(Path("trace.npz"))

    Args:
        coordinator: one without requests: what a buffer holds already is unknown for other sizes.

    Raises:
        CapabilityError: all layers are dense, so there is nothing to record.
        RequestError: there are requests already, or, at the end, decode steps came past the
            recorder, in CUDA graphs that were captured before.
    """
    recorder = Recorder(coordinator)
    recorder.wrap()
    try:
        yield recorder
        recorder.check()
    finally:
        recorder.unwrap()


@define(eq=False)
class _Round:
    """One round. B live rows.

    Attributes:
        forward: the open forward; None while prompts are warmed.
        rows: int32 ``[B, 7]``.
        live: int64 ``[B]`` the rows of the batch that have a request.
        limits: by group int32 ``[B]``.
        layers: by layer number its ids ``[B, H, K]`` and counts ``[B, H, 2]``.
    """

    forward: Any
    rows: np.ndarray
    live: np.ndarray
    limits: dict[int, np.ndarray] = field(factory=dict)
    layers: dict[int, tuple[np.ndarray, np.ndarray]] = field(factory=dict)


class Recorder:
    """Recorder of a coordinator; see ``recording``.

    Args:
        coordinator: the recorded coordinator.
    """

    def __init__(self, coordinator: SparseCoordinator) -> None:
        self.coordinator = coordinator
        config = coordinator.config
        self._groups = [
            index for index, each in enumerate(config.groups) if each.shape.residency == "sparse"
        ]
        if not self._groups:
            raise CapabilityError("nothing can be recorded", ["all layers are dense"])
        if any(config.groups[index].singly for index in self._groups):
            raise CapabilityError(
                "selections of single queries cannot be recorded",
                [
                    f"with verification {config.verification!r} each of max_queries = "
                    f"{config.max_queries} queries of a row selects for itself, and a trace has "
                    "one selection a step; set verification to 'joint', or max_queries to 1"
                ],
            )
        if coordinator.requests.active.any():
            raise RequestError(
                "recording begins before the first request, because what buffers hold by now is "
                f"not known for other sizes; {int(coordinator.requests.active.sum())} are there: "
                "end them, and attach the model anew if they are not yours"
            )
        self._rounds: list[_Round] = []
        self._round: _Round | None = None
        self._events: list[tuple[int, ...]] = []
        self._counted = {
            index: store.counters.cpu().numpy().copy()
            for index, store in enumerate(coordinator.manager.stores)
        }
        self._came_past: set[int] = set()

    def wrap(self) -> None:
        """Put a wrapper in the place of each sparse group's transfer engine."""
        self._engines = list(self.coordinator.transfers)
        for index in self._groups:
            wrapper = _Recorded(self._engines[index], self, index)
            # The list is the one that Requests has, so that its calls come here too.
            self.coordinator.transfers[index] = wrapper
        self._bind()

    def unwrap(self) -> None:
        """Leave the coordinator as it was."""
        self.coordinator.transfers[:] = self._engines
        self._bind()

    def _bind(self) -> None:
        for path in self.coordinator.layers:
            path.transfer = self.coordinator.transfers[path.lanes.index]

    def trace(self) -> Trace:
        """Return everything that was recorded so far."""
        rows = [each.rows for each in self._rounds]
        config, model = self.coordinator.config, self.coordinator.model
        shape = {
            name: getattr(model, name)
            for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "attention")
        }
        settings = {
            "topkv": topkv.__version__,
            "model": {**shape, "dtype": str(model.dtype).removeprefix("torch.")},
            "requests": config.max_requests,
            "eviction": config.eviction,
            "transfer": config.transfer,
            "impl": config.impl,
        }
        return Trace(
            settings,
            np.concatenate([np.zeros((0, len(ROW)), np.int32), *rows]),
            np.array(self._events, np.int32).reshape(-1, 6),
            tuple(map(self._group, self._groups)),
        )

    def _group(self, index: int) -> Group:
        lowered = self.coordinator.config.groups[index]
        shape = lowered.shape
        geometry = Geometry(
            layers=shape.layers,
            unit=shape.unit,
            lane_heads=shape.lane_heads,
            select=shape.select,
            buffer_slots=shape.buffer_slots,
            ring_slots=shape.ring_slots,
            max_units=shape.max_units,
            entry_bytes=shape.entry_bytes,
            host_entry_bytes=shape.host_entry_bytes,
            budget=lowered.budget,
            algorithm=str(lowered.algorithm),
            params=values(lowered.params),
        )
        count = sum(len(each.rows) for each in self._rounds)
        lanes = (count, len(shape.layers), shape.lane_heads)
        ids = np.full((*lanes, shape.select), -1, np.int32)
        limits, counts = np.zeros(count, np.int32), np.zeros((*lanes, 2), np.int32)
        first = 0
        for each in self._rounds:
            rows = slice(first, first + len(each.rows))
            first = rows.stop
            limits[rows] = each.limits.get(index, 0)
            for place, layer in enumerate(shape.layers):
                if layer in each.layers:  # a forward that was dropped lacks some
                    ids[rows, place], counts[rows, place] = each.layers[layer]
        return Group(geometry, ids, limits, counts)

    def check(self) -> None:
        """Refuse a recording that steps came past, by what the coordinator counted meanwhile."""
        for slot in range(self.coordinator.config.max_requests):
            self._compare(slot, self._groups)
        if self._came_past:
            raise RequestError(
                f"requests in slots {sorted(self._came_past)} hit or missed units that were not "
                "recorded, in CUDA graphs that were captured before, say; record eagerly"
            )

    # Calls of the wrappers.

    def planned(
        self, group: int, layer: LayerView, ids: Tensor, limit: Tensor, plan: Plan
    ) -> None:
        """Record a plan that was made, with the counts in ``plan``."""
        forward, found = self.coordinator.forward, self._round
        if found is None or found.forward is not forward or layer.layer in found.layers:
            found = self._begin(forward, layer.step)
        if not len(found.rows):
            return
        shape, live = layer.group, found.live
        each = (layer.step.batch, shape.lane_heads)
        chosen = ids.cpu().numpy().reshape(*each, -1)[live]
        count, misses = (x.cpu().numpy().reshape(each)[live] for x in (plan.count, plan.misses))
        counts = np.stack([count - misses, misses], -1)
        found.limits[group] = limit.cpu().numpy()[live]
        found.layers[layer.layer] = chosen, counts
        lanes = self._counted[group].shape[1] // shape.lane_heads
        held = self._counted[group].reshape(-1, lanes, shape.lane_heads, 2)
        held[layer.index, found.rows[:, ROW.slot]] += counts

    def _begin(self, forward: Any, step: StepTensors) -> _Round:
        warm = torch.full_like(step.slots, forward is None)
        columns = (step.slots, step.lengths, step.high, step.appended, step.resident, warm)
        values = torch.stack(columns, 1).cpu().numpy()
        live = np.flatnonzero(values[:, 0] >= 0)
        number = np.full((len(live), 1), len(self._rounds), np.int32)
        self._round = _Round(forward, np.hstack([number, values[live]]), live)
        if len(live):
            self._events.append((KIND.PLAN, len(self._rounds), 0, 0, 0, 0))
            self._rounds.append(self._round)
        return self._round

    def closed(self, step: StepTensors) -> None:
        """Record that rows' tokens are offloaded where they filled a unit."""
        columns = (step.slots, step.lengths, step.high, step.appended, step.resident)
        for slot, length, high, appended, resident in torch.stack(columns, 1).tolist():
            if slot >= 0 and length > 0 and appended and resident:
                self._events.append((KIND.CLOSE, slot, length - appended, length, high, 1))

    def written(self, slot: int, start: int, end: int, high: int, resident: bool) -> None:
        """Record tokens that went to their pages, and to the buffer where the lane fits."""
        if start < end:
            self._events.append((KIND.WRITE, slot, start, end, high, int(resident)))

    def forgotten(self, slot: int) -> None:
        """Record that the buffer of a request was forgotten, in all groups."""
        self._events.append((KIND.RESET, slot, 0, 0, 0, 0))

    def forgets(self, group: int, slot: int) -> None:
        """Check the counts of a request whose buffer is about to be forgotten in a group."""
        self._compare(slot, [group])

    def _compare(self, slot: int, groups: Sequence[int]) -> None:
        for index in groups:
            store = self.coordinator.manager.stores[index]
            lanes = store.lanes_of(slot)
            counted = store.counters[:, lanes].cpu().numpy()
            if not np.array_equal(counted, self._counted[index][:, lanes]):
                self._came_past.add(slot)


class _Recorded:
    """A transfer engine that reports calls to a recorder; all else goes to the engine itself.

    Calls that concern all groups alike are reported by the first group, chunks by its first layer.
    """

    def __init__(self, engine: Any, recorder: Recorder, group: int) -> None:
        self.engine, self.recorder, self.group = engine, recorder, group
        self.counts_steps = group == recorder._groups[0]
        shape = recorder.coordinator.config.groups[group].shape
        self.first, self.step = shape.layers[0], recorder.coordinator.step

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def plan(self, layer: LayerView, ids: Tensor, limit: Tensor, out: Plan) -> None:
        """Plan and report; hooks here and below are those of ``topkv.hooks.transfer.Transfer``."""
        if ids.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RequestError(CAPTURED)
        self.engine.plan(layer, ids, limit, out)
        self.recorder.planned(self.group, layer, ids, limit, out)

    def offload(self) -> None:
        self.engine.offload()
        if self.counts_steps:
            self.recorder.closed(self.step)

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
        self.engine.store_chunk(layer, slot, start, k, v, high, resident)
        if self.counts_steps and layer.layer == self.first:
            self.recorder.written(slot, start, start + len(k), high, resident)

    def flush(self, slot: int, length: int, high: int, resident: bool) -> None:
        self.engine.flush(slot, length, high, resident)
        if self.counts_steps:
            self.recorder.written(slot, max(0, length - 1), length, high, resident)

    def restore(self, slot: int, length: int, resident: bool) -> None:
        self.recorder.forgets(self.group, slot)
        self.engine.restore(slot, length, resident)
        if self.counts_steps:
            self.recorder.forgotten(slot)
            self.recorder.written(slot, 0, length, length, resident)

    def reset(self, slot: int) -> None:
        self.recorder.forgets(self.group, slot)
        self.engine.reset(slot)
        if self.counts_steps:
            self.recorder.forgotten(slot)
