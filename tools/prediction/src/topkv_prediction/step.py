"""The model of a captured decode step: bytes over rates, and a fixed cost for each layer."""

from __future__ import annotations

import torch
from attrs import frozen

from topkv.assembly.assembly import Tensors, make_plugins
from topkv.config import LoweredConfig, LoweredGroup
from topkv.memory.manager import SparseKVCacheManager
from topkv.memory.representations import RepresentationPools
from topkv.plugins import PluginRegistry
from topkv.plugins import registry as default_registry
from topkv.types import GroupShape, newest_units
from topkv_prediction.machine import Machine, bytes_ms

LONG = 8192
"""Tokens of a row above which ranking takes hardly longer: algorithms that select single tokens
bring a top-k for long rows along."""


@frozen
class StepTime:
    """Milliseconds of a step by part.

    Attributes:
        model: everything that is not attention.
        fixed: launches, and what the host does before and behind them.
        device: keys, values and representations that are read from device memory.
        link: bytes that are read from the host, while nothing else happens.
    """

    model: float
    fixed: float
    device: float
    link: float

    @property
    def ms(self) -> float:
        return self.model + self.fixed + self.device + self.link


@frozen
class Held:
    """Bytes that a request holds.

    Attributes:
        device: on the device through topkv: buffers, resident layers, representations and maps.
        host: in the host pool.
        resident: on the device if all layers keep their keys and values there.
    """

    device: int
    host: int
    resident: int


class StepModel:
    """Times and bytes of decoding with one configuration. Contexts are tokens of a request.

    Args:
        manager: its groups and representations; one on the device ``meta`` serves as well.
        machine: where it is to run.
        model_ms: of a step, for everything that is not attention; 0 leaves it out.
    """

    def __init__(
        self, manager: SparseKVCacheManager, machine: Machine, model_ms: float = 0.0
    ) -> None:
        self.machine, self.model_ms = machine, model_ms
        self.page_tokens = manager.config.page_tokens
        self.groups = list(zip(manager.config.groups, manager.representations, strict=True))
        sparse = [g.shape for g, _ in self.groups if g.shape.residency == "sparse"]
        self.covered = max((shape.slots * shape.unit for shape in sparse), default=0)
        """Tokens of a context of which every unit fits the buffer and the ring of its lanes."""

    @classmethod
    def of(
        cls,
        config: LoweredConfig,
        machine: Machine,
        model_ms: float = 0.0,
        registry: PluginRegistry | None = None,
    ) -> StepModel:
        """Make the model from a lowered configuration: allocates nothing but scratch of plugins.

        Raises what ``SparseCoordinator`` does for plugins that do not fit."""
        plugins = make_plugins(registry or default_registry(), config)
        manager = Tensors(config, plugins, torch.device("meta")).manager
        return cls(manager, machine, model_ms)

    def topkv(
        self, context: float, requests: float, hit_rate: float, queries: int = 1
    ) -> StepTime:
        """Predict a step as configured.

        Above ``covered`` and ``LONG`` it is linear in each of the first three arguments. Several
        queries share a selection, so bytes and launches are those of one, but for their own units.

        Args:
            context: tokens of each request.
            requests: that decode together.
            hit_rate: share of the units that a step selects that need no load, of requests that
                outgrow the buffer; others miss nothing.
            queries: tokens of a request that a step verifies.
        """
        fixed, device, link = self.machine.step_us, 0.0, 0.0
        for group, pools in self.groups:
            shape, layers = group.shape, len(group.shape.layers)
            if shape.residency != "sparse":
                fixed += layers * self.machine.dense_us
                read = requests * context * layers * _row(shape)
                if shape.residency == "resident":
                    device += read
                else:
                    link += read
                continue
            ranked = _ranked(context, group, pools) * self.machine.column_ns / 1e3
            fixed += layers * (self.machine.sparse_us + ranked)
            newest = newest_units(queries, shape.unit)
            attended = min(context, (shape.select + newest) * shape.unit)
            device += requests * (context * _index(pools) + layers * attended * _row(shape))
            if context > shape.slots * shape.unit:
                missed = (1 - hit_rate) * shape.select * shape.lane_heads
                link += requests * layers * missed * shape.host_entry_bytes
        return self._time(fixed, device, link)

    def resident(self, context: float, requests: float) -> StepTime:
        """Predict a step over a cache that stays on the GPU, captured in the same way."""
        layers = sum(len(group.shape.layers) for group, _ in self.groups)
        fixed = self.machine.step_us + layers * self.machine.dense_us
        return self._time(fixed, requests * context * self._rows(), 0.0)

    def _time(self, fixed_us: float, device: float, link: float) -> StepTime:
        machine = self.machine
        times = bytes_ms(device, machine.memory), bytes_ms(link, machine.link)
        return StepTime(self.model_ms, fixed_us / 1e3, *times)

    def _rows(self) -> int:
        """Return the bytes of a token in all layers."""
        return sum(len(g.shape.layers) * _row(g.shape) for g, _ in self.groups)

    def held(self, context: int) -> Held:
        """Return the bytes of a request; device bytes that all requests share are left out."""
        pages = -(-context // self.page_tokens)
        tokens = pages * self.page_tokens
        device, host = 4 * pages, 0
        for group, pools in self.groups:
            shape, layers = group.shape, len(group.shape.layers)
            device += int(tokens * _index(pools)) + _per_request(pools)
            if shape.residency == "resident":
                device += layers * tokens * _row(shape)
                continue
            units = tokens // shape.unit
            host += layers * units * shape.lane_heads * shape.host_entry_bytes
            if shape.residency == "sparse":
                device += shape.lane_heads * _lane_bytes(shape, units)
        return Held(device, host, tokens * self._rows())


def _ranked(context: float, group: LoweredGroup, pools: RepresentationPools) -> float:
    """Return the number of units that are scored and ranked, where they cost time."""
    if _index(pools) == 0:
        return 0.0  # it selects by other means
    if group.selected_as.unit == 1:
        return min(context, LONG)
    return context / group.selected_as.unit


def _row(shape: GroupShape) -> int:
    """Return the bytes of a token's keys and values in a layer, on the device."""
    return shape.lane_heads * shape.entry_bytes // shape.unit


def _index(pools: RepresentationPools) -> float:
    """Return the bytes of a token's representations in all layers; scoring reads all."""
    size = 0.0
    for spec in pools.specs:
        if spec.grain != "request":
            per = pools.group.unit if spec.grain == "unit" else 1
            size += pools.pools[spec.name][:, 0].nbytes / per
    return size


def _per_request(pools: RepresentationPools) -> int:
    """Return the bytes of representations that are kept by request, in all layers."""
    return sum(
        pools.pools[spec.name][:, 0].nbytes for spec in pools.specs if spec.grain == "request"
    )


def _lane_bytes(shape: GroupShape, units: int) -> int:
    """Return the bytes of a lane in all layers: buffer, ring and maps, see ``topkv.kv.store``."""
    maps = 4 * units + 8 * shape.buffer_slots + 32
    return len(shape.layers) * (shape.slots * shape.entry_bytes + maps) + 4 * shape.slots
