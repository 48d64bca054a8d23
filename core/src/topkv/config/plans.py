"""What each layer does: overrides, dense layers, and the values of its algorithm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, frozen

from topkv.config.checks import near
from topkv.config.layers import LayerOverride
from topkv.config.sources import DEFAULT, Lookup, Setting, Source, Sources
from topkv.messages import shown

Rule = tuple[str, Mapping[str, Any]]
"""The merged overrides of a layer: the origin to print, and values by key; empty without any."""


@frozen(kw_only=True)
class LayerPlan:
    """Everything that decides in which group a layer is, and where it came from.

    Attributes:
        residency: ``"sparse"``, ``"resident"`` or ``"streamed"``.
        algorithm: None for dense layers, and where none could be chosen.
        scope: ``"shared"`` for dense layers.
        unit, budget, buffer: tokens; 0 for dense layers.
        selects: tokens of a unit that the algorithm selects: ``unit``, or 1 where selections are
            regranulated; 0 for dense layers.
        params: complete.
        regranulate: the user allows it. What comes of it is ``selects``, so it takes no part in
            comparisons.
        settings: the values with their origins; takes no part in comparisons.
    """

    residency: str
    algorithm: str | None = None
    scope: str = "shared"
    unit: int = 0
    budget: int = 0
    buffer: int = 0
    selects: int = 0
    params: Mapping[str, Any] = field(factory=dict)
    regranulate: bool = field(default=False, eq=False)
    settings: tuple[Setting, ...] = field(default=(), eq=False)

    @property
    def sparse(self) -> bool:
        return self.residency == "sparse"

    def chosen(self, reach: int) -> int:
        """What the algorithm selects: the budget less the tail unit, and no more than the tokens
        that a request can reach."""
        return min(self.budget - self.unit, reach) // self.selects

    def select(self, reach: int) -> int:
        """K: the units that this can lie in."""
        return min(self.chosen(reach), reach // self.unit)


def rules_of(found: Setting | None, num_layers: int, reasons: list[str]) -> list[Rule]:
    """The rule of each layer; of several overrides, values of later ones win."""
    rules: list[Rule] = [("", {})] * num_layers
    overrides: Sequence[LayerOverride] = found.value if found else ()
    for override in overrides:
        origin = f"{found.origin if found else ''}, layers[{shown(override.text)}]"
        try:
            layers = override.layers(num_layers)
        except ValueError as error:
            reasons.append(f"layers[{shown(override.text)}] {error}")
            continue
        for layer in layers:
            before, now = rules[layer][1], override.values
            merged = {**before, **now}
            if "params" in before and "params" in now:
                merged["params"] = {**before["params"], **now["params"]}
            rules[layer] = (origin, merged)
    return rules


def dense_layers(sources: Sources, num_layers: int, reasons: list[str]) -> Setting:
    """Which layers are dense; a plugin's default may name more layers than the model has."""
    found = sources.get("dense_layers")
    outside = [layer for layer in found.value if layer >= num_layers]
    if outside and found.origin in ("user", "checkpoint"):
        reasons.append(
            f"dense_layers names {outside}, and the model has {num_layers} layers, "
            f"0 to {num_layers - 1}"
        )
    inside = tuple(layer for layer in found.value if layer < num_layers)
    return Setting("dense_layers", inside, found.origin)


def base_algorithm(rules: Sequence[Rule], sources: Sources, plugins: Lookup) -> Setting | None:
    """The algorithm of the layers that no override speaks of, if there are any."""
    found = sources.find("algorithm")
    if found is not None:
        return found
    dense = sources.get("dense_layers").value
    for layer, (_, rule) in enumerate(rules):
        residency = rule.get("residency", "resident" if layer in dense else "sparse")
        if residency == "sparse" and "algorithm" not in rule:
            return plugins.choose("algorithm", sources)
    named = {rule["algorithm"] for _, rule in rules if "algorithm" in rule}
    return Setting("algorithm", named.pop(), "the only one in layers") if len(named) == 1 else None


@frozen(kw_only=True)
class Planner:
    """Makes the plans of sparse layers.

    Attributes:
        sources: user and checkpoint.
        plugins: gathers why a plugin cannot be had.
        base: algorithm of the layers without an override.
        backend: its name, if it is known.
    """

    sources: Sources
    plugins: Lookup
    base: str | None
    backend: str | None

    def plan(self, origin: str, rule: Mapping[str, Any]) -> LayerPlan:
        """The plan of a sparse layer with this rule."""
        algorithm = rule.get("algorithm", self.base)
        written = self.sources.over(Source(origin, rule)) if rule else self.sources
        offered = self.plugins.defaults("algorithm", algorithm)
        capabilities = self.plugins.capabilities("algorithm", algorithm)
        sources = written.under(offered)
        allowed = written.get("regranulate")  # for users to allow, not for plugins
        unit = sources.get("unit")
        tokens = allowed.value and capabilities.single_tokens
        if tokens and not written.find("unit"):
            unit = self._readable(unit)
        budget = sources.get("budget")
        buffer = sources.get("buffer", 2 * budget.value, f"{DEFAULT}: 2 x budget")
        scope = sources.get("scope")
        if (
            capabilities.scopes
            and scope.origin == DEFAULT
            and scope.value not in capabilities.scopes
        ):
            scope = Setting("scope", capabilities.scopes[0], offered.origin)
        params = self._params(algorithm, sources) if algorithm else {}
        return LayerPlan(
            residency="sparse",
            algorithm=algorithm,
            scope=scope.value,
            unit=unit.value,
            budget=budget.value,
            buffer=buffer.value,
            selects=1 if tokens else unit.value,
            params={name: param.value for name, param in params.items()},
            regranulate=allowed.value,
            settings=(unit, allowed, scope, budget, buffer, *params.values()),
        )

    def _readable(self, unit: Setting) -> Setting:
        """The unit of an algorithm, or the backend's smallest where it reads none as small."""
        units = self.plugins.capabilities("backend", self.backend).units
        if units is None or unit.value >= units[0]:
            return unit
        whose = self.plugins.defaults("backend", self.backend).origin
        return Setting("unit", units[0], f"{whose}: its smallest")

    def _params(self, algorithm: str, sources: Sources) -> dict[str, Setting]:
        """Parameters from the weakest source to the strongest; those of the user hold for the
        base."""
        known = self.plugins.parameters("algorithm", algorithm)
        record = self.plugins.get("algorithm", algorithm)
        origin = self.plugins.defaults("algorithm", algorithm).origin
        merged = {name: Setting(f"params.{name}", value, origin) for name, value in known.items()}
        for source in reversed(sources.stack):
            if algorithm != self.base and "layers[" not in source.origin:
                continue
            for name, value in source.values.get("params", {}).items():
                if record and name not in known:
                    who = f"{record.package} {record.version} ({algorithm!r})"
                    reason = f"unknown parameter {shown(name)} of {who}; {near(name, known)}"
                    self.plugins.reasons.append(reason)
                merged[name] = Setting(f"params.{name}", value, source.origin)
        return merged


def alike(plans: Sequence[LayerPlan]) -> list[tuple[list[int], LayerPlan]]:
    """Layers with equal plans, by first layer."""
    found: list[tuple[list[int], LayerPlan]] = []
    for layer, plan in enumerate(plans):
        for layers, known in found:
            if known == plan:
                layers.append(layer)
                break
        else:
            found.append(([layer], plan))
    return found
