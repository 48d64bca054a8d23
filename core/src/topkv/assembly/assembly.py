"""Putting a coordinator together: plugins, the memory of both tiers, and the path of each layer.

Everything that is decided per layer is decided here, so that the decode path decides nothing.
"""

from __future__ import annotations

import torch
from attrs import evolve, frozen
from torch import Tensor

from topkv.assembly.stages import make_stages
from topkv.config import LoweredConfig, LoweredGroup
from topkv.config.pairs import pair_reasons
from topkv.config.stages import Named
from topkv.decode.lanes import LaneBuffers
from topkv.decode.layers import LayerPath
from topkv.decode.loads import Loads, bind_loads
from topkv.decode.selectors import Own, Selector
from topkv.errors import CONFIG_REFUSED, ConfigError, DeviceMemoryError, undone_by
from topkv.hooks.algorithm import Algorithm, AlgorithmSetup, AlgorithmSpec
from topkv.hooks.backend import Backend, BackendSetup
from topkv.hooks.eviction import Eviction, EvictionSetup
from topkv.hooks.keeper import Keeper, KeeperSetup
from topkv.hooks.topk import TopK, TopKSetup
from topkv.hooks.transfer import Transfer, TransferSetup
from topkv.kv.host_pool import HostKVPool
from topkv.kv.step import StepUploader
from topkv.memory.manager import SparseKVCacheManager
from topkv.memory.prompt_buffer import prompt_buffer
from topkv.plugins import PluginRegistry
from topkv.plugins.contract import has_hook
from topkv.report import MemoryReport, count_memory
from topkv.transfer.eviction import require_kernel
from topkv.types import LayerView


@frozen
class Plugins:
    """Instances of plugins, made for one configuration.

    Attributes:
        algorithms, specs: algorithm and its spec of each group; None for a dense one.
        backends: backend of each group.
        eviction: the eviction policy.
        keeper: keeps pages that no request holds; None where nobody does.
    """

    algorithms: list[Algorithm | None]
    specs: list[AlgorithmSpec | None]
    backends: list[Backend]
    eviction: Eviction
    keeper: Keeper | None = None

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
    model, device, impl = config.model, config.device, config.impl
    keeper: Keeper | None = None
    if isinstance(config.pages, Named):
        asked = KeeperSetup(config.pages.params, config, registry)
        keeper = registry.create("keeper", config.pages.name, asked)
    algorithms = [_make_algorithm(registry, config, group) for group in config.groups]
    sizes = device, config.max_requests, model.group_size
    setups = [
        BackendSetup(model, group.shape, *sizes, group.options, group.queries)
        for group in config.groups
    ]
    backends = [registry.create("backend", config.backend, setup, impl) for setup in setups]
    reasons = []
    for group, algorithm, reads in zip(config.groups, algorithms, backends, strict=True):
        if algorithm is not None:
            reasons += pair_reasons(algorithm, reads, config, group)
    if reasons:
        raise ConfigError(CONFIG_REFUSED, reasons)
    specs = [algorithm.spec() if algorithm else None for algorithm in algorithms]
    eviction = registry.create("eviction", config.eviction, EvictionSetup(device), impl)
    if impl == "triton":
        require_kernel(eviction, registry.get("eviction", config.eviction).who)
    return Plugins(algorithms, specs, backends, eviction, keeper)


def _make_algorithm(
    registry: PluginRegistry, config: LoweredConfig, group: LoweredGroup
) -> Algorithm | None:
    """The algorithm of a group, stages behind it; None for a dense one."""
    if group.algorithm is None:
        return None

    def topk(rows: int, columns: int, select: int) -> TopK:
        setup = TopKSetup(rows, columns, select, config.device)
        made: TopK = registry.create("topk", config.topk, setup, config.impl)
        return made

    stages = make_stages(registry, config, group)
    sizes = topk, group.queries
    setup = AlgorithmSetup(config.model, stages.group, group.params, config.device, *sizes)
    return stages.behind(registry.create("algorithm", group.algorithm, setup, config.impl))


class Tensors:
    """All tensors of a coordinator that are not scratch of plugins.

    Args:
        config, plugins: give the sizes.
        device: where the tensors are; ``meta`` to count bytes before any is taken.

    Attributes:
        manager: host pool, buffers, maps, representations.
        uploader: step tensors.
        lanes: buffers of each group.
        views: by layer number: view of transfer and backend, selector, prompt buffer.
    """

    def __init__(self, config: LoweredConfig, plugins: Plugins, device: torch.device) -> None:
        pool = plugins.keeper.host_pool() if plugins.keeper else HostKVPool
        keeps_state = has_hook(plugins.eviction, "new_state")
        self.manager = SparseKVCacheManager(config, plugins.specs, device, pool, keeps_state)
        with undone_by(self.manager.close):
            self._allocate(config, plugins, device)

    def _allocate(self, config: LoweredConfig, plugins: Plugins, device: torch.device) -> None:
        self.uploader = StepUploader(
            [(group.shape.unit, group.tail == "selectable") for group in config.groups],
            max_batch=config.max_requests,
            shape=(config.max_requests, config.max_request_tokens // config.page_tokens),
            device=device,
            single=max(config.max_queries if group.singly else 0 for group in config.groups),
        )
        self.lanes = []
        for index, group in enumerate(config.groups):
            lanes = LaneBuffers(config, index, self.uploader.rows, config.max_queries, device)
            if group.singly:
                singles = self.uploader.singles
                lanes.singles = [LaneBuffers(config, index, rows, 1, device) for rows in singles]
            self.lanes.append(lanes)
        self.views: dict[int, tuple[LayerView, Selector | None, Tensor]] = {}
        for index, algorithm in enumerate(plugins.algorithms):
            for view, selecting in self.manager.layer_views(index, self.uploader.step):
                selector: Selector | None = None
                if algorithm and view.layer in config.groups[index].selecting:
                    selector = Own(config, selecting, self.lanes[index], algorithm)
                elif algorithm:
                    selects_prompts = has_hook(algorithm, "retrieve_prompt")
                    selector = Selector(selecting, self.lanes[index], selects_prompts)
                rows = prompt_buffer(config, view.group, device)
                self.views[view.layer] = (view, selector, rows)

    def memory(self, plugins: Plugins) -> MemoryReport:
        """Bytes of these tensors and of the scratch of plugins."""
        holders = [self.lanes, self.views, plugins.algorithms, plugins.backends]
        return count_memory(self.manager, self.uploader, holders)


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
        setup = TransferSetup(store, views, plugins.eviction, config.max_queries)
        engine: Transfer = registry.create("transfer", config.transfer, setup, config.impl)
        transfers.append(engine)
        for view in views:
            k_slots, v_slots = store.slot_views(view.index)
            path = LayerPath(
                view=view,
                algorithm=plugins.algorithms[index],
                transfer=engine,
                backend=plugins.backends[index],
                lanes=tensors.lanes[index],
                format=config.format,
                host=store.host,
                selector=tensors.views[view.layer][1],
                k_slots=k_slots,
                v_slots=v_slots,
                prompt_buffer=tensors.views[view.layer][2],
            )
            path.singles = [_single(path, lanes) for lanes in path.lanes.singles]
            paths.append(path)
        bind_loads(config, paths[-len(views) :])
    return transfers, sorted(paths, key=lambda path: path.view.layer)


def _single(path: LayerPath, lanes: LaneBuffers) -> LayerPath:
    """Return the path of one query of each row. It loads in its layer's turn: what is loaded ahead
    for one query might evict what another has still to attend to."""
    view, selector = evolve(path.view, step=lanes.step), path.selector
    single = evolve(path, view=view, lanes=lanes, selector=selector and selector.seen_by(lanes))
    single.loads = Loads(single)
    return single
