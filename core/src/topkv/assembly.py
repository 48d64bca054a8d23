"""Putting a coordinator together: the plugins of each group, and the way through each layer.

``make_plugins`` allocates nothing but what plugins take when they are made; the tensors of a
selection come with ``connect``, when the pools are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from attrs import evolve, frozen

from topkv.config import LoweredConfig, LoweredGroup
from topkv.config.negotiation import MAX_SELECT
from topkv.errors import ConfigError
from topkv.kv.manager import SparseKVCacheManager
from topkv.kv.rows import row_format
from topkv.ops.topk import selecting_by
from topkv.plugins import PluginRegistry
from topkv.transfer.eviction import require_kernel
from topkv.types import AlgorithmSpec
from topkv.workspace import LaneBuffers, LayerPath, TokenSelection


@frozen
class Plugins:
    """What was made for a configuration.

    Attributes:
        config: with the width of each selection as its algorithm wants it.
        algorithms: of each group; None for a dense one.
        specs: of each group, as the core goes by them.
        backends: of each group.
    """

    config: LoweredConfig
    algorithms: list[Any]
    specs: list[AlgorithmSpec | None]
    backends: list[Any]

    def least(self, what: str) -> int:
        """The least of a number that specs may state; beyond all counts where none does."""
        stated = [getattr(spec, what) for spec in self.specs if spec]
        return min((number for number in stated if number is not None), default=2**31 - 1)


def make_plugins(registry: PluginRegistry, config: LoweredConfig) -> Plugins:
    """Algorithms and backends of all groups.

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
    return Plugins(wide, algorithms, _core_specs(wide, specs), backends)


@frozen
class Connected:
    """Transfer engine and lanes of each group, and the way through each layer, in their order."""

    transfers: list[Any]
    lanes: list[LaneBuffers]
    layers: list[LayerPath]


def connect(
    registry: PluginRegistry, plugins: Plugins, manager: SparseKVCacheManager
) -> Connected:
    """Bring plugins and pools together."""
    config, step = plugins.config, manager.uploader.step
    model, sizes = config.model, (config.max_requests, config.device)
    eviction = _make_eviction(registry, config)
    made = Connected([], [], [])
    for index, (group, store) in enumerate(zip(config.groups, manager.stores, strict=True)):
        views = manager.layer_views(index)
        what = (store, views, eviction, config.impl)
        transfer = registry.create("transfer", config.transfer, *what)
        spec = plugins.specs[index]
        lanes = LaneBuffers(
            *(model, store.group, step, *sizes),
            index=index,
            tail=spec is not None and spec.tail == "forced",
            tokens=TokenSelection(group, *sizes, config.impl) if group.regranulated else None,
        )
        made.transfers.append(transfer)
        made.lanes.append(lanes)
        hooks = (plugins.algorithms[index], transfer, plugins.backends[index])
        rows = row_format(model, config.kv_format, config.impl)
        indexed = _goes_by_index(registry, group.algorithm)
        for view, seen in zip(views, manager.seen_views(index, views), strict=True):
            selects = not model.indexer or model.indexer.selects_for(view.layer)
            stored = (store.extra[view.index], *store.slot_views(view.index))
            made.layers.append(
                LayerPath(view, seen, *hooks, lanes, rows, indexed, selects, *stored)
            )
    made.layers.sort(key=lambda path: path.view.layer)
    return made


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


def _goes_by_index(registry: PluginRegistry, name: str | None) -> bool:
    """Whether an algorithm selects by the model's own indexer."""
    entry = registry.get("algorithm", name).entry if name else None
    return entry is not None and entry.capabilities.needs_index


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
        raise ConfigError("the configuration is refused; nothing was allocated", [reason])


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
                raise ConfigError("the configuration is refused; nothing was allocated", [reason])
            if select >= MAX_SELECT:
                reason = f"{wide}units, and must stay below {MAX_SELECT}; lower budget"
                raise ConfigError("the configuration is refused; nothing was allocated", [reason])
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
