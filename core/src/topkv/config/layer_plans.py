"""What each layer does: overrides, dense layers, and the values of its algorithm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, frozen

from topkv.config.layers import LayerOverride
from topkv.config.lowered import Setting
from topkv.config.sources import DEFAULT, Plugins, Source, Sources
from topkv.config.values import near
from topkv.entries import SCOPES
from topkv.messages import shown

BUDGET = 2048
UNIT = 16


@frozen
class LayerPlan:
    """Everything that decides in which group a layer is, and where it came from.

    Attributes:
        residency: ``"sparse"``, ``"resident"`` or ``"streamed"``.
        algorithm: None for dense layers, and where none could be chosen.
        unit, budget, buffer: tokens; 0 for dense layers.
        selects: tokens of a unit that the algorithm selects: ``unit``, or 1 where selections are
            regranulated; 0 for dense layers.
        regranulate: the user allows it. What comes of it is ``selects``, so it takes no part in
            comparisons.
        scope: None for dense layers.
        params: complete.
        settings: the values with their origins; takes no part in comparisons.
    """

    residency: str
    algorithm: str | None = None
    unit: int = 0
    scope: str | None = None
    budget: int = 0
    buffer: int = 0
    selects: int = 0
    params: Mapping[str, Any] = field(factory=dict)
    regranulate: bool = field(default=False, eq=False)
    settings: tuple[Setting, ...] = field(default=(), eq=False)


def rules_of(
    found: Setting | None, num_layers: int, reasons: list[str]
) -> list[tuple[str, dict[str, Any]]]:
    """The merged override of each layer with the origin to print; later ones win."""
    rules: list[tuple[str, dict[str, Any]]] = [("", {}) for _ in range(num_layers)]
    overrides: Sequence[LayerOverride] = found.value if found else ()
    for override in overrides:
        try:
            layers = override.layers(num_layers)
        except ValueError as error:
            reasons.append(f"layers[{shown(override.text)}] {error}")
            continue
        for layer in layers:
            _, values = rules[layer]
            merged = {**values, **override.values}
            if "params" in values and "params" in override.values:
                merged["params"] = {**values["params"], **override.values["params"]}
            origin = f"{found.origin if found else ''}, layers[{shown(override.text)}]"
            rules[layer] = (origin, merged)
    return rules


def dense_layers(sources: Sources, num_layers: int, reasons: list[str]) -> Setting:
    """Which layers are dense; a plugin's default may name more layers than the model has."""
    found = sources.get("dense_layers", ())
    outside = [layer for layer in found.value if layer >= num_layers]
    if outside and found.origin in ("user", "checkpoint"):
        reasons.append(
            f"dense_layers names {outside}, and the model has {num_layers} layers, "
            f"0 to {num_layers - 1}"
        )
    inside = tuple(layer for layer in found.value if layer < num_layers)
    return Setting("dense_layers", inside, found.origin)


def base_algorithm(
    rules: Sequence[tuple[str, dict[str, Any]]], sources: Sources, plugins: Plugins
) -> Setting | None:
    """The algorithm of the layers that no override speaks of, if there are any."""
    found = sources.find("algorithm")
    if found is not None:
        return found
    dense = sources.get("dense_layers", ()).value
    named = {rule["algorithm"] for _, rule in rules if "algorithm" in rule}
    for layer, (_, rule) in enumerate(rules):
        residency = rule.get("residency", "resident" if layer in dense else "sparse")
        if residency == "sparse" and "algorithm" not in rule:
            return plugins.choose("algorithm", sources)
    return Setting("algorithm", named.pop(), "the only one in layers") if len(named) == 1 else None


def _params(
    plan_algorithm: str,
    base: str | None,
    sources: Sources,
    plugins: Plugins,
    reasons: list[str],
) -> tuple[dict[str, Any], list[Setting]]:
    """Parameters from the weakest source to the strongest; those of the user hold for the base."""
    known = plugins.parameters("algorithm", plan_algorithm)
    record = plugins.get("algorithm", plan_algorithm)
    origin = f"{record.package} {record.version}" if record else DEFAULT
    merged = {name: Setting(f"params.{name}", value, origin) for name, value in known.items()}
    for source in reversed(sources.stack):
        overrides = "layers[" in source.origin
        if plan_algorithm != base and not overrides:
            continue
        for name, value in source.values.get("params", {}).items():
            if record and name not in known:
                who = f"{record.package} {record.version} ({plan_algorithm!r})"
                reason = f"unknown parameter {shown(name)} of {who}; {near(name, known)}"
                if reason not in reasons:
                    reasons.append(reason)
            merged[name] = Setting(f"params.{name}", value, source.origin)
    return {name: setting.value for name, setting in merged.items()}, list(merged.values())


def _scope(algorithm: str | None, sources: Sources, plugins: Plugins) -> Setting:
    record = plugins.get("algorithm", algorithm) if algorithm else None
    scopes = record.entry.capabilities.scopes if record and record.entry else None
    if record and scopes and SCOPES[0] not in scopes:
        return sources.get("scope", scopes[0], f"{record.package} {record.version}")
    return sources.get("scope", SCOPES[0])


def plan_layers(
    rules: Sequence[tuple[str, dict[str, Any]]],
    base: str | None,
    dense: Sequence[int],
    residency: str,
    sources: Sources,
    plugins: Plugins,
    backend: str | None,
) -> list[LayerPlan]:
    """The plan of each layer.

    Args:
        rules: see ``rules_of``.
        base: algorithm of layers without an override.
        dense: layers that are dense unless an override says otherwise.
        residency: of dense layers that no override names.
        sources: user and checkpoint.
        plugins: gathers why a plugin cannot be had.
        backend: its name, if it is known.
    """
    plans = []
    for layer, (origin, rule) in enumerate(rules):
        where = rule.get("residency", residency if layer in dense else "sparse")
        if where != "sparse":
            plans.append(LayerPlan(where))
            continue
        algorithm = rule.get("algorithm", base)
        chain = sources.over(Source(origin, rule)) if rule else sources
        own = chain.under(plugins.defaults("algorithm", algorithm))
        reader = None if chain.find("unit") else backend
        allowed = chain.get("regranulate", False)  # for users to allow, not for plugins
        plans.append(_sparse_plan(algorithm, base, own, plugins, allowed, reader))
    return plans


def _units(
    algorithm: str | None, sources: Sources, plugins: Plugins, allowed: bool, backend: str | None
) -> tuple[Setting, int]:
    """The unit, and the unit that the algorithm selects.

    Args:
        allowed: selections may be regranulated.
        backend: whose smallest unit is taken if the algorithm's is too small for it; None where
            user or checkpoint have set a unit.
    """
    unit = sources.get("unit", UNIT)
    if not (allowed and plugins.selects_tokens(algorithm)):
        return unit, unit.value
    reader = plugins.get("backend", backend) if backend else None
    units = reader.entry.capabilities.units if reader and reader.entry else None
    if reader and units and unit.value < units[0]:
        origin = f"{reader.package} {reader.version}: its smallest"
        unit = Setting("unit", units[0], origin)
    return unit, 1


def _sparse_plan(
    algorithm: str | None,
    base: str | None,
    sources: Sources,
    plugins: Plugins,
    allowed: Setting,
    backend: str | None,
) -> LayerPlan:
    unit, selects = _units(algorithm, sources, plugins, allowed.value, backend)
    budget = sources.get("budget", BUDGET)
    buffer = sources.get("buffer", 2 * budget.value, f"{DEFAULT}: 2 x budget")
    scope = _scope(algorithm, sources, plugins)
    params: dict[str, Any] = {}
    origins: list[Setting] = []
    if algorithm:
        params, origins = _params(algorithm, base, sources, plugins, plugins.reasons)
    return LayerPlan(
        "sparse",
        algorithm,
        unit.value,
        scope.value,
        budget.value,
        buffer.value,
        selects,
        params,
        allowed.value,
        (unit, allowed, scope, budget, buffer, *origins),
    )
