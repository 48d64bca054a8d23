"""From what a user wrote to what plugins receive, checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm
from typing import Any

import torch
from attrs import define, evolve, field

from topkv.config.checks import clean
from topkv.config.layers import show_ranges
from topkv.config.lowered import LoweredConfig, LoweredGroup, in_tokens
from topkv.config.negotiation import Ask, model_refusals, refusals
from topkv.config.plans import LayerPlan, Planner, alike, base_algorithm, dense_layers, rules_of
from topkv.config.settings import CHECKS, DEFAULTS, SHARED, SparseConfig
from topkv.config.sizes import (
    host_reasons,
    impl_reasons,
    model_reasons,
    plan_reasons,
    shape_reasons,
    sharing_reasons,
)
from topkv.config.sources import COMPUTED, DEFAULT, Lookup, Setting, Source, Sources
from topkv.errors import CONFIG_REFUSED, ConfigError
from topkv.kv.layout import lay_out
from topkv.kv.rows import format_reasons, row_format
from topkv.messages import shown
from topkv.plugins import PluginRegistry
from topkv.types import GroupShape, ModelShape

Alike = Sequence[tuple[list[int], LayerPlan]]
"""Layers and their plan."""


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
    reasons = model_reasons(model)
    if reasons:
        raise ConfigError(CONFIG_REFUSED, reasons)
    # Each stage adds to the reasons and goes on with a default.
    plugins = Lookup(registry, reasons)
    known = _Resolver(_written(config, checkpoint, reasons), plugins)
    plans = alike(_plan(known, model.num_layers))
    _keep_plans(known, plans)
    lowered = _settle(known, plans, model, torch.device(device), max_positions)
    lowered = _negotiate(known, lowered, plans)
    lowered = _group(known, lowered, plans)
    if reasons:
        raise ConfigError(CONFIG_REFUSED, dict.fromkeys(reasons))
    return lowered


@define
class _Resolver:
    """Resolves settings, one by one, and keeps each with its origin.

    Attributes:
        sources: grow by the defaults of each plugin that is used.
        plugins: gathers reasons.
        settings: what was resolved, in the order in which it is shown.
    """

    sources: Sources
    plugins: Lookup
    settings: list[Setting] = field(factory=list)

    def set(self, name: str, default: Any = None, origin: str = DEFAULT) -> Any:
        return self.keep(self.sources.get(name, default, origin))

    def keep(self, setting: Setting) -> Any:
        self.settings.append(setting)
        return setting.value

    def computed(self, name: str, value: Any) -> None:
        self.keep(Setting(name, value, COMPUTED))

    def use(self, kind: str, choice: Setting | None) -> str | None:
        """Keep the choice of a plugin; from here on its defaults hold."""
        if choice is None:
            return None
        stated = [source.origin for source in self.sources.stack[2:] if kind in source.values]
        if self.plugins.get(kind, choice.value) is None and choice.origin in stated:
            self.plugins.reasons.append(
                f"{choice.origin} asks for {kind} {choice.value!r}: reinstall it with what it "
                f"depends on, or set {kind}"
            )
        self.sources = self.sources.under(self.plugins.defaults(kind, choice.value))
        name: str = self.keep(choice)
        return name


def _written(config: SparseConfig, checkpoint: Any, reasons: list[str]) -> Sources:
    user = Source("user", clean(config.as_dict(), CHECKS, reasons))
    checkpoint = {} if checkpoint is None else checkpoint
    if not isinstance(checkpoint, Mapping):
        reasons.append(f"checkpoint: topkv must be a mapping, got {shown(checkpoint)}")
        checkpoint = {}
    advice = clean(checkpoint, CHECKS, reasons, "checkpoint: ")
    if "dense_layers" in user.values:
        # Overrides stand above dense_layers, but what a checkpoint advises not above the user.
        advice.pop("layers", None)
    return Sources((user, Source("checkpoint", advice)))


def _plan(known: _Resolver, num_layers: int) -> list[LayerPlan]:
    """Choose the plugins and what each layer does."""
    plugins, written = known.plugins, known.sources
    rules = rules_of(written.find("layers"), num_layers, plugins.reasons)
    base = known.use("algorithm", base_algorithm(rules, written, plugins))
    if base is None and written.find("params"):
        plugins.reasons.append(
            "params are set and no single algorithm is; move them into the layers overrides"
        )
    backend = known.use("backend", plugins.choose("backend", known.sources))
    for kind in ("transfer", "eviction"):
        known.use(kind, known.sources.get(kind))
    for name in known.set("observers"):
        known.sources = known.sources.under(plugins.defaults("observer", name))
    dense = known.keep(dense_layers(known.sources, num_layers, plugins.reasons))
    residency = known.set("dense_residency")
    planner = Planner(sources=written, plugins=plugins, base=base, backend=backend)
    plans = []
    for layer, (origin, rule) in enumerate(rules):
        where = rule.get("residency", residency if layer in dense else "sparse")
        sparse = where == "sparse"
        plans.append(planner.plan(origin, rule) if sparse else LayerPlan(residency=where))
    # One for all layers: that of the base algorithm stands above those of overrides.
    for algorithm in dict.fromkeys(plan.algorithm for plan in plans):
        stated = plugins.defaults("algorithm", algorithm)
        only = {key: value for key, value in stated.values.items() if key == "topk"}
        known.sources = known.sources.under(Source(stated.origin, only))
    known.use("topk", known.sources.get("topk"))
    return plans


def _keep_plans(known: _Resolver, plans: Alike) -> None:
    """The first sparse layers under plain names, others under their layers if they differ."""
    first: dict[str, Setting] = {}
    for layers, plan in plans:
        if not plan.sparse:
            continue
        if not first:
            first = {setting.name: setting for setting in plan.settings}
            known.settings += plan.settings
            continue
        where = f"layers[{show_ranges(layers)}]"
        if plan.algorithm:
            known.computed(f"{where}.algorithm", plan.algorithm)
        for setting in plan.settings:
            if first.get(setting.name) != setting:
                known.keep(evolve(setting, name=f"{where}.{setting.name}"))


def _settle(
    known: _Resolver,
    plans: Alike,
    model: ModelShape,
    device: torch.device,
    max_positions: int | None,
) -> LoweredConfig:
    """Resolve the settings that hold for all layers. Groups come later."""
    reasons = known.plugins.reasons
    units = [plan.unit for _, plan in plans if plan.sparse]
    step = lcm(*units)
    ring = -(-max(32, 2 * max(units, default=1)) // step) * step
    page = known.set("page_tokens")
    known.set("ring_tokens", ring, f"{DEFAULT}: two of the largest unit")
    kernels = "triton" if device.type == "cuda" else "reference"
    reasons += impl_reasons(known.set("impl", kernels, f"{DEFAULT} on {device.type}"), device)
    requests = known.set("max_requests")
    least = known.sources.get("max_request_tokens", 0).value
    tokens = max(max_positions or DEFAULTS["max_tokens"], least)
    origin = "positions of the model" if tokens == max_positions else DEFAULT
    tokens = known.set("max_tokens", tokens, origin)
    request = known.set("max_request_tokens", tokens, f"{DEFAULT}: max_tokens")
    if request > tokens:
        reasons.append(
            f"max_request_tokens must be at most max_tokens, got {request} and {tokens}"
        )
    num_pages = -(-tokens // page) + requests + 1
    known.computed("num_pages", num_pages)
    derived = {"prefill_block_tokens": max(DEFAULTS["prefill_block_tokens"] // page, 1) * page}
    resolved = {setting.name for setting in known.settings}
    for name in SHARED:
        if name not in resolved and name != "backend":  # one that could not be chosen
            known.set(name, derived.get(name))
    values = {setting.name: setting.value for setting in known.settings if setting.name in SHARED}
    values["max_request_tokens"] = -(-request // page) * page
    lowered = LoweredConfig(**values, device=device, model=model, num_pages=num_pages)
    reasons += format_reasons(model, lowered.kv_format)
    if lowered.prefill_block_tokens % page:
        reasons.append(
            f"prefill_block_tokens must be a multiple of page_tokens, got "
            f"{lowered.prefill_block_tokens} and {page}"
        )
    return lowered


def _negotiate(known: _Resolver, lowered: LoweredConfig, plans: Alike) -> LoweredConfig:
    """Every group against its plugins, and its sizes against each other."""
    plugins, capturable = known.plugins, True
    for layers, plan in plans:
        where = f"(layers {show_ranges(layers)}"
        if plan.sparse:
            plugins.reasons += plan_reasons(plan, lowered, f"{where})")
        ask = Ask(
            attention=lowered.model.attention,
            scope=plan.scope,
            unit=plan.unit if plan.sparse else lowered.page_tokens,
            residency=plan.residency,
            regranulate=plan.regranulate,
            single_tokens=plugins.capabilities("algorithm", plan.algorithm).single_tokens,
        )
        asked: list[tuple[str, str | None]] = [("algorithm", plan.algorithm)]
        asked += [("backend", lowered.backend), ("transfer", lowered.transfer)]
        if plan.sparse:
            asked += [("eviction", lowered.eviction), ("topk", lowered.topk)]
        for kind, name in asked:
            record = plugins.get(kind, name)
            if record is None or record.entry is None:
                continue
            caps = record.entry.capabilities
            capturable &= caps.capture
            of_kind = evolve(ask, unit=plan.selects) if kind == "algorithm" else ask
            told = [", ".join(pair) for pair in refusals(kind, caps, of_kind)]
            told += model_refusals(record.entry, plan.residency, lowered)
            plugins.reasons += [f"{record.who} {t} {where}, {plan.residency})" for t in told]
    known.computed("capturable", capturable)
    return evolve(lowered, capturable=capturable)


def _group(known: _Resolver, lowered: LoweredConfig, plans: Alike) -> LoweredConfig:
    """Make the groups, and check their bytes."""
    reasons = known.plugins.reasons
    groups = []
    for layers, plan in plans:
        shape = seen = _shape(lowered, layers, plan)
        if plan.selects != plan.unit:
            seen = in_tokens(shape, plan.chosen(lowered.max_request_tokens))
        reasons += shape_reasons(shape, seen, lowered.num_pages)
        indexed = known.plugins.capabilities("algorithm", plan.algorithm).needs_index
        groups.append(
            LoweredGroup(
                shape=shape,
                algorithm=plan.algorithm,
                params=plan.params,
                budget=plan.budget,
                seen=seen,
                indexed=indexed,
                tail=plan.tail,
            )
        )
    reasons += sharing_reasons(lowered.model, groups)
    on_host = [group.shape for group in groups if group.shape.residency != "resident"]
    _, size = lay_out(on_host, lowered.host_layout, lowered.num_pages)
    known.computed("host_pool_bytes", size)
    reasons += host_reasons(size, lowered)
    return evolve(lowered, groups=tuple(groups), settings=tuple(known.settings))


def _shape(lowered: LoweredConfig, layers: Sequence[int], plan: LayerPlan) -> GroupShape:
    heads, reach = lowered.model.num_kv_heads, lowered.max_request_tokens
    unit = plan.unit if plan.sparse else lowered.page_tokens
    lanes = heads if plan.scope == "kv_head" else 1
    rows = row_format(lowered.model, lowered.kv_format)
    return GroupShape(
        layers=tuple(layers),
        unit=unit,
        lane_heads=lanes,
        heads_per_lane=heads // lanes,
        head_dim=rows.dim,
        dtype=rows.dtype,
        page_tokens=lowered.page_tokens,
        max_requests=lowered.max_requests,
        max_units=reach // unit,
        select=plan.select(reach) if plan.sparse else 0,
        buffer_slots=plan.buffer // unit,
        ring_slots=lowered.ring_tokens // unit if plan.sparse else 0,
        residency=plan.residency,
        planes=rows.planes,
    )
