"""Putting a coordinator together: plugins, the memory of both tiers, and the path of each layer.

Everything that is decided per layer is decided here, so that the decode path decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from attrs import evolve, frozen

from topkv.config import LoweredConfig, LoweredGroup
from topkv.config.sizes import MAX_SELECT
from topkv.errors import CONFIG_REFUSED, ConfigError, DeviceMemoryError
from topkv.kv.rows import row_format
from topkv.kv.step import StepUploader
from topkv.lanes import LaneBuffers
from topkv.layers import LayerPath
from topkv.memory import MemoryReport, SparseKVCacheManager
from topkv.ops.topk import selecting_by
from topkv.plugins import PluginRegistry
from topkv.selectors import Own, Regranulated, Selector, Shared, SharedRegranulated
from topkv.transfer.eviction import require_kernel
from topkv.types import AlgorithmSpec, LayerView


@frozen
class Plugins:
    """What was made for a configuration.

    Attributes:
        config: with the width of each selection as its algorithm wants it.
        algorithms: of each group; None for a dense one.
        specs: of each group, as the core goes by them.
        backends: of each group.
        eviction: the eviction policy.
    """

    config: LoweredConfig
    algorithms: list[Any]
    specs: list[AlgorithmSpec | None]
    backends: list[Any]
    eviction: Any

    def least(self, number: str) -> int:
        """Smallest value of a spec's attribute over all groups, 2**31 - 1 if none states it."""
        stated = [getattr(spec, number) for spec in self.specs if spec]
        return min((value for value in stated if value is not None), default=2**31 - 1)


def make_plugins(registry: PluginRegistry, config: LoweredConfig) -> Plugins:
    """Algorithms and backends of all groups, with the scratch that they take.

    Raises:
        ConfigError, PluginError: with every reason of the first that refuses.
    """
    algorithms = [_make_algorithm(registry, config, group) for group in config.groups]
    specs = [algorithm.spec() if algorithm else None for algorithm in algorithms]
    wide = _with_tail_rules(config, specs)
    for index, (before, group) in enumerate(zip(config.groups, wide.groups, strict=True)):
        if group is not before:  # it was told of another width
            algorithms[index] = _make_algorithm(registry, wide, group)
    backends = [_make_backend(registry, wide, group) for group in wide.groups]
    for algorithm, backend in zip(algorithms, backends, strict=True):
        _check_prompts(algorithm, backend, wide)
    eviction = _make_eviction(registry, config)
    return Plugins(wide, algorithms, _core_specs(wide, specs), backends, eviction)


class Tensors:
    """All tensors of a coordinator that are not scratch of plugins.

    Args:
        plugins: what they are for.
        device: where they lie; ``meta`` to count bytes before any is taken.

    Attributes:
        manager: host pool, buffers, maps, representations.
        uploader: step tensors.
        lanes: buffers of each group.
        views: of each layer by number: what transfer and backend see, and its selector.
    """

    def __init__(self, plugins: Plugins, device: torch.device) -> None:
        config = plugins.config
        self.manager = SparseKVCacheManager(config, plugins.specs, device)
        tails = [spec.tail if spec else None for spec in plugins.specs]
        units = [group.shape.unit for group in config.groups]
        max_pages = config.max_request_tokens // config.page_tokens
        self.uploader = StepUploader(
            [(unit, tail == "selectable") for unit, tail in zip(units, tails, strict=True)],
            max_batch=config.max_requests,
            shape=(config.max_requests, max_pages),
            device=device,
        )
        self.lanes = [
            LaneBuffers(config, index, tail == "forced", self.uploader, device)
            for index, tail in enumerate(tails)
        ]
        self.views: dict[int, tuple[LayerView, Selector | None]] = {}
        for index, lanes in enumerate(self.lanes):
            for view, seen in self.manager.layer_views(index, self.uploader.step):
                extra = self.manager.stores[index].extra[view.index]
                algorithm = plugins.algorithms[index]
                selector = _selector(config, index, seen, algorithm, lanes, extra)
                self.views[view.layer] = (view, selector)

    def memory(self, plugins: Plugins) -> MemoryReport:
        """Bytes of these tensors and of the scratch of plugins."""
        selectors = [selector for _, selector in self.views.values()]
        holders = [self.lanes, selectors, plugins.algorithms, plugins.backends]
        return self.manager.memory(self.uploader.step, holders)


def _selector(
    config: LoweredConfig,
    index: int,
    seen: LayerView,
    algorithm: Any,
    lanes: LaneBuffers,
    extra: torch.Tensor,
) -> Selector | None:
    """Where the selection of a layer comes from; None in a dense layer."""
    group = config.groups[index]
    if algorithm is None:
        return None
    if seen.layer not in config.selecting_layers(group):
        prompts = getattr(algorithm, "retrieve_prompt", None) is not None
        if group.regranulated:
            return SharedRegranulated(seen, lanes, prompts, extra)
        return Shared(seen, lanes, prompts)
    device = lanes.step.slots.device
    if group.regranulated:
        return Regranulated(config, seen, algorithm, lanes, group.indexed, device, extra=extra)
    return Own(config, seen, algorithm, lanes, group.indexed, device)


def allocate(plugins: Plugins) -> Tensors:
    """Make all tensors, if the device may hold them.

    Raises:
        HostMemoryError, DeviceMemoryError: a tier is too small; nothing is left allocated.
    """
    config = plugins.config
    needed = Tensors(plugins, torch.device("meta")).memory(plugins).device
    if config.device_memory is not None and needed > config.device_memory:
        raise DeviceMemoryError(
            f"buffers, maps, resident layers, representations and scratch need {needed} bytes and "
            f"device_memory allows {config.device_memory}; lower buffer, max_requests or "
            "max_tokens, take a coarser unit, or raise device_memory"
        )
    return Tensors(plugins, config.device)


def connect(
    registry: PluginRegistry, plugins: Plugins, tensors: Tensors
) -> tuple[list[Any], list[LayerPath]]:
    """The transfer engine of each group, and the path of each layer."""
    config, manager = plugins.config, tensors.manager
    transfers, paths = [], []
    for index, store in enumerate(manager.stores):
        views = [tensors.views[layer][0] for layer in store.group.layers]
        transfer = registry.create(
            "transfer", config.transfer, store, views, plugins.eviction, config.impl
        )
        transfers.append(transfer)
        for view in views:
            k_slots, v_slots = store.slot_views(view.index)
            paths.append(
                LayerPath(
                    view=view,
                    algorithm=plugins.algorithms[index],
                    transfer=transfer,
                    backend=plugins.backends[index],
                    lanes=tensors.lanes[index],
                    format=row_format(config.model, config.kv_format, config.impl),
                    selector=tensors.views[view.layer][1],
                    k_slots=k_slots,
                    v_slots=v_slots,
                )
            )
    return transfers, sorted(paths, key=lambda path: path.view.layer)


def _make_algorithm(registry: PluginRegistry, config: LoweredConfig, group: LoweredGroup) -> Any:
    """The algorithm of a group; None for a dense one."""
    if group.algorithm is None:
        return None
    params = dict(group.params)
    what = (config.model, group.seen, params, config.impl, config.device)
    with selecting_by(partial(registry.create, "topk", config.topk)):
        return registry.create("algorithm", group.algorithm, *what)


def _make_backend(registry: PluginRegistry, config: LoweredConfig, group: LoweredGroup) -> Any:
    """The backend of a group."""
    what = (config.model, group.shape, config.impl, config.device, config.max_requests)
    return registry.create("backend", config.backend, *what)


def _make_eviction(registry: PluginRegistry, config: LoweredConfig) -> Any:
    """The eviction policy, with a kernel where the transfer engines run kernels."""
    eviction = registry.create("eviction", config.eviction)
    if config.impl == "triton":
        require_kernel(eviction, registry.get("eviction", config.eviction).who)
    return eviction


def _check_prompts(algorithm: Any, backend: Any, config: LoweredConfig) -> None:
    """An algorithm that selects for prompts needs a backend that can attend to a selection."""
    if (
        getattr(algorithm, "retrieve_prompt", None) is not None
        and getattr(backend, "prefill_selected", None) is None
    ):
        reason = (
            "the algorithm selects for the rows of a prompt too (retrieve_prompt), and backend "
            f"{config.backend} has no prefill_selected; choose another backend"
        )
        raise ConfigError(CONFIG_REFUSED, [reason])


def _with_tail_rules(
    config: LoweredConfig, specs: Sequence[AlgorithmSpec | None]
) -> LoweredConfig:
    """Give the tail's share of the budget back where the algorithm lets the tail compete.

    Not where selections are regranulated, see ``_core_specs``.
    """
    groups = []
    for group, spec in zip(config.groups, specs, strict=True):
        if spec and spec.tail == "selectable" and not group.regranulated:
            select = min(group.budget // group.shape.unit, group.shape.max_units)
            wide = f"{group.algorithm} lets the newest token compete, so a selection has {select} "
            if select > group.shape.buffer_slots:
                reason = (
                    f"{wide}units and the buffer holds {group.shape.buffer_slots}; "
                    f"raise buffer to at least {select * group.shape.unit} tokens or lower budget"
                )
                raise ConfigError(CONFIG_REFUSED, [reason])
            if select >= MAX_SELECT:
                reason = f"{wide}units, and must stay below {MAX_SELECT}; lower budget"
                raise ConfigError(CONFIG_REFUSED, [reason])
            shape = evolve(group.shape, select=select)
            group = evolve(group, shape=shape, seen=shape)
        groups.append(group)
    return evolve(config, groups=tuple(groups))


def _core_specs(
    config: LoweredConfig, specs: Sequence[AlgorithmSpec | None]
) -> list[AlgorithmSpec | None]:
    """The specs as the core goes by them.

    Where selections are regranulated the tail unit is forced, even if the newest token competes:
    only the ring has that unit, and it is not full.
    """
    return [
        evolve(spec, tail="forced") if spec and group.regranulated else spec
        for group, spec in zip(config.groups, specs, strict=True)
    ]
