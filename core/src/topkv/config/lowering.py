"""From what a user wrote to what plugins receive, checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from math import lcm
from typing import Any

import torch
from attrs import evolve

from topkv.checks import clean
from topkv.config.layers import show_ranges
from topkv.config.lowered import LoweredConfig, LoweredGroup
from topkv.config.negotiation import LayerPlan, all_refusals, queries_at_once
from topkv.config.plans import Plans, plan_layers
from topkv.config.settings import CHECKS, DEFAULTS, SHARED, SparseConfig
from topkv.config.sizes import (
    group_reasons,
    host_reasons,
    impl_reasons,
    model_reasons,
    sharing_reasons,
)
from topkv.config.sources import (
    COMPUTED,
    DEFAULT,
    Plugin,
    Resolver,
    Setting,
    Sources,
    pick,
    with_origin,
)
from topkv.config.stages import Named, option_reasons, regrain_reasons
from topkv.errors import CONFIG_REFUSED, ConfigError, ReasonsError
from topkv.hooks.host_format import HostFormat, HostFormatSetup
from topkv.hooks.kv_format import KVFormatSetup
from topkv.kv.host_format import PLAIN
from topkv.kv.kv_format import AsMade
from topkv.kv.layout import lay_out
from topkv.messages import shown
from topkv.plugins import PluginRegistry
from topkv.types import GroupShape, ModelShape, newest_units


def lower(
    config: SparseConfig,
    model: ModelShape,
    *,
    device: torch.device,
    registry: PluginRegistry,
    checkpoint: Mapping[str, Any] | None = None,
    max_positions: int | None = None,
) -> LoweredConfig:
    """Complete and check a configuration. Allocates nothing.

    Args:
        config: what the user set.
        model: geometry of the attention layers.
        device: where the model decodes.
        registry: where plugins are looked up.
        checkpoint: what the checkpoint recommends, with the keys of ``SparseConfig``.
        max_positions: positions of the model, the default of ``max_tokens``.

    Raises:
        ConfigError: with every reason at once.
    """
    reasons = list(model_reasons(model))
    if reasons:
        raise ConfigError(CONFIG_REFUSED, reasons)
    # Each stage adds to the reasons and goes on with a default.
    known = Resolver(registry, reasons, _written(config, checkpoint, reasons))
    plans = plan_layers(known, model)
    lowered = _settle(known, plans, model, torch.device(device), max_positions)
    lowered = _keep(known, _group(known, plans, lowered))
    if reasons:
        raise ConfigError(CONFIG_REFUSED, dict.fromkeys(reasons))
    return evolve(lowered, settings=tuple(known.settings.values()))


def _written(config: SparseConfig, checkpoint: Any, reasons: list[str]) -> Sources:
    """The checked values of the user, and those of the checkpoint where the user sets none."""
    user = clean(config.as_dict(), CHECKS, reasons)
    checkpoint = {} if checkpoint is None else checkpoint
    if not isinstance(checkpoint, Mapping):
        reasons.append(f"checkpoint: topkv must be a mapping, got {shown(checkpoint)}")
        checkpoint = {}
    advice = clean(checkpoint, CHECKS, reasons, "checkpoint: ")
    if "dense_layers" in user:
        # Overrides stand above dense_layers, but what a checkpoint advises not above the user.
        advice.pop("layers", None)
    return {**with_origin("checkpoint", advice), **with_origin("user", user)}


def _settle(
    known: Resolver,
    plans: Plans,
    model: ModelShape,
    device: torch.device,
    max_positions: int | None,
) -> LoweredConfig:
    """Resolve the settings that hold for all layers. Groups come later."""
    reasons = known.reasons
    units = [plan.unit for _, plan in plans if plan.sparse]
    step = lcm(*units)
    queries, unit = known.set("max_queries"), max(units, default=1)
    ring = -(-max(32, unit * newest_units(queries + 1, unit)) // step) * step
    page = known.set("page_tokens")
    known.set("ring_tokens", ring, f"{DEFAULT}: the open unit and the tokens of a step")
    kernels = "triton" if device.type == "cuda" else "reference"
    reasons += impl_reasons(known.set("impl", kernels, f"{DEFAULT} on {device.type}"), device)
    requests = known.set("max_requests")
    least = pick(known.sources, "max_request_tokens", 0).value
    tokens = max(max_positions or DEFAULTS["max_tokens"], least)
    origin = "positions of the model" if tokens == max_positions else DEFAULT
    tokens = known.set("max_tokens", tokens, origin)
    request = known.set("max_request_tokens", tokens, f"{DEFAULT}: max_tokens")
    if request > tokens:
        reasons.append(
            f"max_request_tokens must be at most max_tokens, got {request} and {tokens}"
        )
    num_pages = -(-tokens // page) + requests + 1
    known.keep(Setting("num_pages", num_pages, COMPUTED))
    block = DEFAULTS["prefill_block_tokens"]
    if model.attention == "mla":  # a row is small, and the results of blocks are large to merge
        block *= 4
    derived = {"prefill_block_tokens": max(block // page, 1) * page}
    for name in SHARED:
        if name not in known.settings and name != "backend":  # one that could not be chosen
            known.set(name, derived.get(name))
    values = {name: each.value for name, each in known.settings.items() if name in SHARED}
    values["max_request_tokens"] = -(-request // page) * page
    setup, kv_format = KVFormatSetup(model), values["kv_format"]
    made = _format(known, "kv_format", kv_format, values["impl"], setup, AsMade(setup))
    values |= {"device": device, "model": model, "num_pages": num_pages, "format": made}
    lowered = LoweredConfig(**values)
    if lowered.prefill_block_tokens % page:
        reasons.append(
            f"prefill_block_tokens must be a multiple of page_tokens, got "
            f"{lowered.prefill_block_tokens} and {page}"
        )
    return lowered


def _keep(known: Resolver, lowered: LoweredConfig) -> LoweredConfig:
    """Give the keeper of pages, if there is one, the parameters of its plugin."""
    asked = lowered.pages
    if not isinstance(asked, Named):
        return lowered
    plugin, keeper = known.named("keeper", asked, "(pages)")
    if plugin.entry is None:
        known.reasons.append(
            f"pages must be 'core', 'engine' or a keeper that can be used, got {shown(asked.name)}"
        )
    elif hasattr(keeper.params, "settled"):  # see ``topkv.hooks.keeper``
        keeper = evolve(keeper, params=keeper.params.settled(known, lowered))
    known.keep(evolve(known.settings["pages"], value=keeper))
    return evolve(lowered, pages=keeper)


def _group(known: Resolver, plans: Plans, lowered: LoweredConfig) -> LoweredConfig:
    """Make the groups; check each against its plugins, its sizes, and the bytes of all."""
    capturable, groups, page, model = True, [], lowered.page_tokens, lowered.model
    for layers, plan in plans:
        if not plan.sparse:
            plan = evolve(plan, unit=page, selects=page)
        shape = _shape(lowered, layers, plan)
        host = _host_format(known, lowered, shape) if plan.sparse else PLAIN
        shape = selected_as = evolve(shape, coded_bytes=host.coded_bytes())
        if plan.selects != plan.unit:
            selected_as = _in_tokens(shape, plan.chosen(lowered.max_request_tokens))
        indexed = known.plugin("algorithm", plan.algorithm).capabilities.needs_index
        most = known.plugin("backend", lowered.backend).capabilities.queries
        queries = queries_at_once(plan, most, lowered)
        group = LoweredGroup(
            shape=shape,
            algorithm=plan.algorithm,
            params=plan.params,
            budget=plan.budget,
            selected_as=selected_as,
            indexed=indexed,
            tail=plan.tail,
            scope=plan.scope,
            stages=plan.stages,
            selecting=_selecting(model, layers, plan, indexed),
            host=host,
            queries=queries,
            singly=queries < lowered.max_queries,
        )
        groups.append(group)
        where = f"(layers {show_ranges(layers)}"
        for plugin in _plugins(known, plan, lowered):
            capturable &= plugin.capabilities.capture
            refused = all_refusals(plugin.entry, plan, lowered) if plugin.entry else ()
            known.reasons += [f"{plugin.who} {why} {where}, {plan.residency})" for why in refused]
        known.reasons += [f"{why} {where})" for why in group_reasons(group, plan.buffer, lowered)]
        known.reasons += sharing_reasons(model, group)
        known.reasons += [f"{why} {where})" for why in option_reasons(group.stages)]
        stated = (plan.unit, plan.algorithm, plan.single_tokens)
        known.reasons += [f"{why} {where})" for why in regrain_reasons(group.stages, *stated)]
        if group.indexed and not all(stage.regrains for stage in group.stages):
            known.reasons.append(
                "stages are given queries and keys, and the algorithm uses the model's own "
                f"indexer; leave stages out {where})"
            )
        if indexed and plan.share != "F":
            known.reasons.append(
                f"share must be 'F' where the algorithm uses the model's own indexer, which "
                f"says itself which layers share, got {plan.share!r} {where})"
            )
    known.keep(Setting("capturable", capturable, COMPUTED))
    on_host = [group.shape for group in groups if group.shape.residency != "resident"]
    _, size = lay_out(on_host, lowered.num_pages)
    known.keep(Setting("host_pool_bytes", size, COMPUTED))
    known.reasons += host_reasons(size, lowered)
    return evolve(lowered, groups=tuple(groups), capturable=capturable)


def _selecting(
    model: ModelShape, layers: Sequence[int], plan: LayerPlan, indexed: bool
) -> tuple[int, ...]:
    """Return the layers of a group that select for themselves."""
    if not plan.sparse:
        return ()
    if indexed:
        return tuple(n for n in layers if model.indexer is None or model.indexer.selects_for(n))
    return tuple(n for n, part in zip(layers, cycle(plan.share), strict=False) if part == "F")


def _plugins(known: Resolver, plan: LayerPlan, lowered: LoweredConfig) -> list[Plugin]:
    """Return the plugins that work for a group."""
    names = {
        "algorithm": plan.algorithm,
        "backend": lowered.backend,
        "transfer": lowered.transfer,
        "kv_format": lowered.kv_format,
    }
    if plan.sparse:
        names |= {"eviction": lowered.eviction, "topk": lowered.topk}
        names |= {"host_format": lowered.host_format}
    stages = [known.plugin("stage", stage.name) for stage in plan.stages]
    return [*(known.plugin(kind, name) for kind, name in names.items()), *stages]


def _shape(lowered: LoweredConfig, layers: list[int], plan: LayerPlan) -> GroupShape:
    heads, reach = lowered.model.num_kv_heads, lowered.max_request_tokens
    lanes = heads if plan.scope == "kv_head" else 1
    token = lowered.format.row()
    return GroupShape(
        layers=tuple(layers),
        unit=plan.unit,
        lane_heads=lanes,
        heads_per_lane=heads // lanes,
        head_dim=token.dim,
        dtype=token.dtype,
        page_tokens=lowered.page_tokens,
        max_requests=lowered.max_requests,
        max_units=reach // plan.unit,
        select=plan.select(reach) if plan.sparse else 0,
        buffer_slots=plan.buffer // plan.unit,
        ring_slots=lowered.ring_tokens // plan.unit if plan.sparse else 0,
        residency=plan.residency,
        planes=token.planes,
    )


def _host_format(known: Resolver, lowered: LoweredConfig, shape: GroupShape) -> HostFormat:
    """Make the host format of a sparse group; the plain one where it cannot be had."""
    name, setup = lowered.host_format, HostFormatSetup(lowered.model, shape)
    made: HostFormat = _format(known, "host_format", name, lowered.impl, setup, PLAIN)
    if made.coded_bytes() % 16:
        known.reasons.append(
            f"{known.plugin('host_format', name).who}: coded_bytes must be a multiple of 16, got "
            f"{made.coded_bytes()}"
        )
    return made


def _format(known: Resolver, kind: str, name: str, impl: str, setup: Any, plain: Any) -> Any:
    """Make a format of a kind; the plain one where it cannot be had."""
    plugin = known.plugin(kind, name)
    if plugin.entry is None or impl not in plugin.entry.impls:
        return plain
    try:
        return known.registry.create(kind, name, setup, impl)
    except ReasonsError as error:
        known.reasons += [f"{plugin.who}: {reason}" for reason in error.reasons]
        return plain


def _in_tokens(shape: GroupShape, select: int) -> GroupShape:
    """Return the shape with units of one token, of which ``select`` are selected."""
    return evolve(
        shape,
        unit=1,
        max_units=shape.max_units * shape.unit,
        select=select,
        buffer_slots=shape.buffer_slots * shape.unit,
        ring_slots=shape.ring_slots * shape.unit,
        coded_bytes=0,
    )
