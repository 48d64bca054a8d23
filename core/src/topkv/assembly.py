"""Putting a coordinator together: plugins of each group, and what they mean for its shape.

Nothing here is allocated but what plugins take when they are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from attrs import evolve

from topkv.config import LoweredConfig, LoweredGroup
from topkv.config.negotiation import MAX_SELECT
from topkv.errors import ConfigError
from topkv.ops.topk import selecting_by
from topkv.plugins import PluginRegistry
from topkv.types import AlgorithmSpec


def make_algorithm(registry: PluginRegistry, config: LoweredConfig, group: LoweredGroup) -> Any:
    """The algorithm of a group; None for a dense one."""
    if group.algorithm is None:
        return None
    params = dict(group.params)
    what = (config.model, group.seen, params, config.impl, config.device)
    with selecting_by(partial(registry.create, "topk", config.topk)):
        return registry.create("algorithm", group.algorithm, *what)


def make_backend(registry: PluginRegistry, config: LoweredConfig, group: LoweredGroup) -> Any:
    """The backend of a group."""
    what = (config.model, group.shape, config.impl, config.device, config.max_requests)
    return registry.create("backend", config.backend, *what)


def goes_by_index(registry: PluginRegistry, name: str | None) -> bool:
    """Whether an algorithm selects by the model's own indexer."""
    entry = registry.get("algorithm", name).entry if name else None
    return entry is not None and entry.capabilities.needs_index


def check_prompts(algorithm: Any, backend: Any, config: LoweredConfig) -> None:
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


def with_tail_rules(config: LoweredConfig, specs: Sequence[AlgorithmSpec | None]) -> LoweredConfig:
    """Give the tail's share of the budget back where the algorithm lets the tail compete.

    Not where selections are regranulated, see ``core_specs``.
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


def core_specs(
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
