"""The plan of each layer, from overrides, dense layers and the values of its algorithm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve

from topkv.config.layers import LayerOverride, show_ranges
from topkv.config.negotiation import LayerPlan
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
from topkv.config.stages import StageSettings
from topkv.messages import shown
from topkv.parameters import values
from topkv.types import ModelShape

Plans = Sequence[tuple[list[int], LayerPlan]]
"""Layers and their plan, by first layer."""


def plan_layers(known: Resolver, model: ModelShape) -> Plans:
    """Choose the plugins and what each layer does, and keep the settings of both.

    A configuration speaks of the whole model; plans are made for the layers that are here.
    """
    num_layers = model.total_layers or model.layers.stop
    rules = _rules(known, num_layers)
    base = known.use("algorithm", _base_algorithm(known, rules))
    if base is None and any(name.startswith("params.") for name in known.written):
        known.reasons.append(
            "params are set and no single algorithm is; move them into the layers overrides"
        )
    known.use("backend", known.choose("backend"))
    for kind in ("transfer", "eviction"):
        known.use(kind, pick(known.sources, kind))
    _observe(known)
    dense = known.keep(_dense_layers(known, num_layers))
    residency = known.set("dense_residency")
    plans = {}
    for layer in model.layers:
        rule = rules[layer]
        where = pick(rule, "residency", residency if layer in dense else "sparse").value
        sparse = where == "sparse"
        plans[layer] = sparse_plan(known, rule) if sparse else LayerPlan(residency=where)
    # One for all layers: that of the base algorithm stands above those of overrides.
    for algorithm in dict.fromkeys(plan.algorithm for plan in plans.values()):
        stated = known.plugin("algorithm", algorithm).defaults
        if "topk" in stated:
            known.under({"topk": stated["topk"]})
    known.use("topk", pick(known.sources, "topk"))
    found = _alike(plans)
    _keep(known, found)
    return found


def _rules(known: Resolver, num_layers: int) -> list[Sources]:
    """The overrides of each layer; of several that name a layer, values of later ones win."""
    rules: list[Sources] = [{}] * num_layers
    found = pick(known.written, "layers", ())
    overrides: Sequence[LayerOverride] = found.value
    for override in overrides:
        key = f"layers[{shown(override.text)}]"
        highest = max(max(first, last or 0) for first, last in override.ranges)
        if highest >= num_layers:
            known.reasons.append(
                f"{key} names layer {highest}, and the model has {num_layers} layers, "
                f"0 to {num_layers - 1}"
            )
            continue
        values = with_origin(f"{found.origin}, {key}", override.values)
        for first, last in override.ranges:
            for layer in range(first, num_layers if last is None else last + 1):
                rules[layer] = {**rules[layer], **values}
    return rules


def _dense_layers(known: Resolver, num_layers: int) -> Setting:
    """The layers that are dense. Those beyond the model count only as errors of the user: a
    plugin's default may name more layers than the model has.
    """
    found = pick(known.sources, "dense_layers")
    outside = [layer for layer in found.value if layer >= num_layers]
    if outside and "dense_layers" in known.written:
        known.reasons.append(
            f"dense_layers names {outside}, and the model has {num_layers} layers, "
            f"0 to {num_layers - 1}"
        )
    return evolve(found, value=tuple(layer for layer in found.value if layer < num_layers))


def _base_algorithm(known: Resolver, rules: Sequence[Sources]) -> Setting | None:
    """The algorithm of the layers that no override speaks of, if there are any."""
    if "algorithm" in known.sources:
        return known.sources["algorithm"]
    dense = pick(known.sources, "dense_layers").value
    for layer, rule in enumerate(rules):
        residency = pick(rule, "residency", "resident" if layer in dense else "sparse").value
        if residency == "sparse" and "algorithm" not in rule:
            return known.choose("algorithm")
    named = {rule["algorithm"].value for rule in rules if "algorithm" in rule}
    return Setting("algorithm", named.pop(), "the only one in layers") if len(named) == 1 else None


def sparse_plan(known: Resolver, rule: Sources) -> LayerPlan:
    """The plan of a sparse layer with this rule."""
    base = known.settings.get("algorithm")
    chosen = rule.get("algorithm", base)
    algorithm = chosen.value if chosen else None
    plugin = known.plugin("algorithm", algorithm)
    capabilities = plugin.capabilities
    written = {**known.written, **rule}
    sources = {**plugin.defaults, **written}
    stages = pick(sources, "stages")
    stages = evolve(stages, value=tuple(_stage(known, each, stages) for each in stages.value))
    unit = pick(sources, "unit")
    tokens = capabilities.single_tokens and any(stage.regrains for stage in stages.value)
    if tokens and "unit" not in written:
        unit = _readable(known, unit)
    budget = pick(sources, "budget")
    buffer = pick(sources, "buffer", 2 * budget.value, f"{DEFAULT}: 2 x budget")
    scope = pick(sources, "scope")
    scopes = capabilities.scopes
    if scopes and scope.origin == DEFAULT and scope.value not in scopes:
        scope = Setting("scope", scopes[0], plugin.origin)
    # Those that the user sets for all layers are the base algorithm's.
    of_base = base is not None and algorithm == base.value
    params, set_params = _params(known, plugin, sources if of_base else rule)
    share = pick(sources, "share")
    return LayerPlan(
        residency="sparse",
        algorithm=algorithm,
        scope=scope.value,
        unit=unit.value,
        budget=budget.value,
        buffer=buffer.value,
        selects=1 if tokens else unit.value,
        tail="forced" if tokens else capabilities.tail,
        params=params,
        stages=stages.value,
        share=share.value,
        single_tokens=capabilities.single_tokens,
        settings=(unit, scope, budget, buffer, *set_params, stages, share),
    )


def _readable(known: Resolver, unit: Setting) -> Setting:
    """The unit of an algorithm, or the backend's smallest where it reads none as small."""
    chosen = known.settings.get("backend")
    backend = known.plugin("backend", chosen.value if chosen else None)
    units = backend.capabilities.units
    if units is None or unit.value >= units[0]:
        return unit
    return Setting("unit", units[0], f"{backend.origin}: its smallest")


def _params(known: Resolver, plugin: Plugin, sources: Sources) -> tuple[Any, list[Setting]]:
    """The parameters of an algorithm, and each with its origin: its own, or that of a source."""
    given = {name: each for name, each in sources.items() if name.startswith("params.")}
    origins = ", ".join(dict.fromkeys(each.origin for each in given.values()))
    plain = {name.removeprefix("params."): each.value for name, each in given.items()}
    params = known.params(plugin, plain, f"({origins})")
    own = with_origin(plugin.origin, {"params": values(params)})
    return params, [evolve(given.get(name, each), value=each.value) for name, each in own.items()]


def _stage(known: Resolver, asked: StageSettings, stages: Setting) -> StageSettings:
    """A stage with the parameters of its plugin."""
    plugin, stage = known.named("stage", asked, f"({stages.origin}: stages)")
    stated = plugin.capabilities
    return evolve(stage, options=stated.options, regrains=stated.regrains)


def _observe(known: Resolver) -> None:
    """Lower the observers with the parameters of their plugins, whose defaults then apply."""
    asked, found = pick(known.sources, "observers"), []
    for each in asked.value:
        plugin, observer = known.named("observer", each, "(observers)")
        known.under(plugin.defaults)
        found.append(observer)
    known.keep(evolve(asked, value=tuple(found)))


def _alike(plans: Mapping[int, LayerPlan]) -> Plans:
    """Layers with equal plans, by first layer."""
    found: list[tuple[list[int], LayerPlan]] = []
    for layer, plan in plans.items():
        for layers, known in found:
            if known == plan:
                layers.append(layer)
                break
        else:
            found.append(([layer], plan))
    return found


def _keep(known: Resolver, plans: Plans) -> None:
    """The first sparse layers under plain names, others under their layers if they differ."""
    for layers, plan in plans:
        where = f"layers[{show_ranges(layers)}]."
        is_first = "unit" not in known.settings
        if plan.algorithm and not is_first:
            known.keep(Setting(f"{where}algorithm", plan.algorithm, COMPUTED))
        for setting in plan.settings:  # none of dense layers
            if is_first:
                known.keep(setting)
            elif known.settings.get(setting.name) != setting:
                known.keep(evolve(setting, name=f"{where}{setting.name}"))
