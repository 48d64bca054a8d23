"""Putting a coordinator together: plugins, the memory of both tiers, and the path of each layer.

Everything that is decided per layer is decided here, so that the decode path decides nothing.
"""

from __future__ import annotations

import torch
from attrs import frozen

from topkv.config import LoweredConfig, LoweredGroup
from topkv.errors import CONFIG_REFUSED, ConfigError, DeviceMemoryError
from topkv.hooks.algorithm import Algorithm, AlgorithmSetup
from topkv.hooks.backend import Backend, BackendSetup
from topkv.hooks.binding import has_hook
from topkv.hooks.eviction import Eviction, EvictionSetup
from topkv.hooks.topk import TopK, TopKSetup
from topkv.hooks.transfer import Transfer, TransferSetup
from topkv.kv.rows import row_format
from topkv.kv.step import StepUploader
from topkv.lanes import LaneBuffers
from topkv.layers import LayerPath
from topkv.memory import SparseKVCacheManager
from topkv.plugins import PluginRegistry
from topkv.report import MemoryReport
from topkv.selectors import Own, Regranulated, Selector, Shared, SharedRegranulated
from topkv.transfer.eviction import require_kernel
from topkv.types import AlgorithmSpec, LayerView


@frozen
class Plugins:
    """What was made for a configuration.

    Attributes:
        algorithms: of each group; None for a dense one.
        specs: of each group; None for a dense one.
        backends: of each group.
        eviction: the eviction policy.
    """

    algorithms: list[Algorithm | None]
    specs: list[AlgorithmSpec | None]
    backends: list[Backend]
    eviction: Eviction

    def least(self, number: str) -> int:
        """Smallest value of a spec's attribute over all groups, 2**31 - 1 if none states it."""
        stated = [getattr(spec, number) for spec in self.specs if spec]
        return min((value for value in stated if value is not None), default=2**31 - 1)


def make_plugins(registry: PluginRegistry, config: LoweredConfig) -> Plugins:
    """Algorithms and backends of all groups, with the scratch that they take.

    Raises:
        ConfigError, PluginError: with every reason of the first that refuses.
        DeviceMemoryError: their scratch does not fit.
    """
    algorithms = [_make_algorithm(registry, config, group) for group in config.groups]
    backends = [_make_backend(registry, config, group) for group in config.groups]
    reasons = []
    for group, algorithm, backend in zip(config.groups, algorithms, backends, strict=True):
        if algorithm is not None:
            reasons += _misfits(config, group, algorithm, backend)
    if reasons:
        raise ConfigError(CONFIG_REFUSED, reasons)
    return Plugins(
        algorithms=algorithms,
        specs=[algorithm.spec() if algorithm else None for algorithm in algorithms],
        backends=backends,
        eviction=_make_eviction(registry, config),
    )


def _make_algorithm(
    registry: PluginRegistry, config: LoweredConfig, group: LoweredGroup
) -> Algorithm | None:
    """The algorithm of a group; None for a dense one."""
    if group.algorithm is None:
        return None

    def topk(rows: int, columns: int, select: int) -> TopK:
        made: TopK = registry.create(
            "topk", config.topk, TopKSetup(rows, columns, select, config.device), config.impl
        )
        return made

    setup = AlgorithmSetup(config.model, group.seen, dict(group.params), config.device, topk)
    algorithm: Algorithm = registry.create("algorithm", group.algorithm, setup, config.impl)
    return algorithm


def _make_backend(registry: PluginRegistry, config: LoweredConfig, group: LoweredGroup) -> Backend:
    """The backend of a group."""
    model = config.model
    setup = BackendSetup(
        model, group.shape, config.device, config.max_requests, group_size=model.group_size
    )
    backend: Backend = registry.create("backend", config.backend, setup, config.impl)
    return backend


def _make_eviction(registry: PluginRegistry, config: LoweredConfig) -> Eviction:
    """The eviction policy, with a kernel where the transfer engines run kernels."""
    name, setup = config.eviction, EvictionSetup(config.device)
    eviction: Eviction = registry.create("eviction", name, setup, config.impl)
    if config.impl == "triton":
        require_kernel(eviction, registry.get("eviction", name).who)
    return eviction


def _misfits(
    config: LoweredConfig, group: LoweredGroup, algorithm: Algorithm, backend: Backend
) -> list[str]:
    """What can be told of an algorithm and its backend only when they are there."""
    reasons = []
    if has_hook(algorithm, "retrieve_prompt") and not has_hook(backend, "prefill_selected"):
        reasons.append(
            "the algorithm selects for the rows of a prompt too (retrieve_prompt), and backend "
            f"{config.backend} has no prefill_selected; choose another backend"
        )
    ring, least = group.seen.ring_slots * group.seen.unit, algorithm.spec().ring_tokens
    if ring < least:
        reasons.append(
            f"{group.algorithm} reads a ring of at least {least} tokens, got {ring}; raise "
            f"ring_tokens to {least}"
        )
    return reasons


class Tensors:
    """All tensors of a coordinator that are not scratch of plugins.

    Args:
        config, plugins: what they are for.
        device: where they lie; ``meta`` to count bytes before any is taken.

    Attributes:
        manager: host pool, buffers, maps, representations.
        uploader: step tensors.
        lanes: buffers of each group.
        views: of each layer by number: what transfer and backend see, and its selector.
    """

    def __init__(self, config: LoweredConfig, plugins: Plugins, device: torch.device) -> None:
        self.manager = SparseKVCacheManager(config, plugins.specs, device)
        max_pages = config.max_request_tokens // config.page_tokens
        self.uploader = StepUploader(
            [(group.shape.unit, group.tail == "selectable") for group in config.groups],
            max_batch=config.max_requests,
            shape=(config.max_requests, max_pages),
            device=device,
        )
        self.lanes = [
            LaneBuffers(config, index, self.uploader, device)
            for index in range(len(config.groups))
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
    algorithm: Algorithm | None,
    lanes: LaneBuffers,
    extra: torch.Tensor,
) -> Selector | None:
    """Where the selection of a layer comes from; None in a dense layer."""
    group = config.groups[index]
    if algorithm is None:
        return None
    if seen.layer not in config.selecting_layers(group):
        prompts = has_hook(algorithm, "retrieve_prompt")
        if group.regranulated:
            return SharedRegranulated(seen, lanes, prompts, extra)
        return Shared(seen, lanes, prompts)
    device = lanes.step.slots.device
    if group.regranulated:
        return Regranulated(config, seen, algorithm, lanes, group.indexed, device, extra=extra)
    return Own(config, seen, algorithm, lanes, group.indexed, device)


def required_bytes(config: LoweredConfig, registry: PluginRegistry) -> MemoryReport:
    """What a coordinator would take, before it takes anything but the scratch of plugins.

    Raises:
        ConfigError, PluginError: as of ``make_plugins``.
    """
    plugins = make_plugins(registry, config)
    return Tensors(config, plugins, torch.device("meta")).memory(plugins)


def allocate(config: LoweredConfig, plugins: Plugins) -> Tensors:
    """Make all tensors, if the device may hold them.

    Raises:
        HostMemoryError, DeviceMemoryError: a tier is too small; nothing is left allocated.
    """
    needed = Tensors(config, plugins, torch.device("meta")).memory(plugins).device
    if config.device_memory is not None and needed > config.device_memory:
        raise DeviceMemoryError(
            f"buffers, maps, resident layers, representations and scratch need {needed} bytes and "
            f"device_memory allows {config.device_memory}; lower buffer, max_requests or "
            "max_tokens, take a coarser unit, or raise device_memory"
        )
    return Tensors(config, plugins, config.device)


def connect(
    registry: PluginRegistry, config: LoweredConfig, plugins: Plugins, tensors: Tensors
) -> tuple[list[Transfer], list[LayerPath]]:
    """The transfer engine of each group, and the path of each layer."""
    manager, transfers, paths = tensors.manager, [], []
    for index, store in enumerate(manager.stores):
        views = [tensors.views[layer][0] for layer in store.group.layers]
        setup = TransferSetup(store, views, plugins.eviction)
        transfer: Transfer = registry.create("transfer", config.transfer, setup, config.impl)
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
