"""Check plugins against the layers that they would serve; reasons are returned, not raised.

``topkv plugins --matrix`` lists by the same checks which plugins fit together, and so nothing
here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from topkv.entries import NoParameters, PluginEntry
from topkv.messages import shown

if TYPE_CHECKING:
    from topkv.config.lowered import LoweredConfig
    from topkv.config.sources import Setting
    from topkv.config.stages import StageSettings

READERS = ("algorithm", "stage", "backend", "kv_format", "host_format")
"""Kinds that read rows of keys and values; others move and evict rows."""

QUERIED = ("algorithm", "stage", "backend", "transfer")
"""Kinds that get all queries of a row, or all tokens that it appends."""

SELECTING = ("algorithm", "stage")
"""Kinds whose unit is the selected one; others work in stored units."""


@frozen(kw_only=True)
class LayerPlan:
    """Plan of one layer, by which its plugins are checked. Layers with equal plans are a group.

    Attributes:
        residency: ``"sparse"``, ``"resident"`` or ``"streamed"``.
        algorithm: None for dense layers, and where none could be chosen.
        scope: ``"shared"`` for dense layers.
        unit: tokens; 0 for dense layers, which are read page by page, until pages have a size.
        budget, buffer: tokens; 0 for dense layers.
        selects: tokens of a unit that the algorithm selects: ``unit``, or 1 where a stage
            regrains.
        params: an instance of ``PluginEntry.parameters``.
        stages: behind the algorithm, with instances of theirs.
        share: which layers of a group select, see ``LayerSettings``.
        tail: ``"forced"``, or ``"selectable"`` where the newest token competes in selections.
            Forced where a stage regrains: only the ring has the open unit.
        single_tokens: the algorithm selects single tokens only.
        settings: the values with their origins.

    The last two take no part in comparisons.
    """

    residency: str
    algorithm: str | None = None
    scope: str = "shared"
    unit: int = 0
    budget: int = 0
    buffer: int = 0
    selects: int = 0
    tail: str = "forced"
    params: Any = field(factory=NoParameters)
    stages: tuple[StageSettings, ...] = ()
    share: str = "F"
    single_tokens: bool = field(default=False, eq=False)
    settings: tuple[Setting, ...] = field(default=(), eq=False)

    @property
    def sparse(self) -> bool:
        return self.residency == "sparse"

    def chosen(self, reach: int) -> int:
        """Width of the algorithm's selection, in units of ``selects`` tokens: the budget, less the
        tail unit where it is forced.

        Args:
            reach: tokens that a request can have; no more are selected.
        """
        tail = self.unit if self.tail == "forced" else 0
        return min(self.budget - tail, reach) // self.selects

    def select(self, reach: int) -> int:
        """K: units of ``unit`` tokens that can hold such a selection."""
        return min(self.chosen(reach), reach // self.unit)


def refusals(entry: PluginEntry, plan: LayerPlan, attention: str) -> Iterator[tuple[str, str]]:
    """Yield reasons of a plugin against attention, scope and unit of a layer, whatever the model.

    Args:
        attention: ``"gqa"`` or ``"mla"``.

    Yields:
        Two texts: the values that the plugin takes; the one that it got, and how to change that.
    """
    kind, caps = entry.kind, entry.capabilities
    unit = plan.selects if kind in SELECTING else plan.unit
    if kind in READERS:
        yield from _unless_in(caps.attention, "attention", attention)
    yield from _unless_in(caps.scopes, "scope", plan.scope)
    low, high = caps.units or (unit, unit)
    if not low <= unit <= high:
        change = f"change {'unit' if plan.sparse else 'page_tokens'}"
        lacks = plan.single_tokens and not any(stage.regrains for stage in plan.stages)
        if lacks and (unit < low or kind != "backend"):
            change += ", or add a stage that turns tokens into units"
        yield f"takes units of {low} to {high} tokens", f"got {unit}: {change}"


def all_refusals(entry: PluginEntry, plan: LayerPlan, config: LoweredConfig) -> Iterator[str]:
    """Yield all reasons of a plugin against a layer: ``refusals``, then model and device."""
    model, caps = config.model, entry.capabilities
    dtype = str(model.dtype).removeprefix("torch.")
    pairs = (
        *refusals(entry, plan, model.attention),
        *_unless_in(entry.impls, "impl", config.impl),
        *_unless_in(caps.dtypes, "dtype", dtype),
        *_unless_in(caps.head_dims, "head_dim", model.head_dim),
    )
    if entry.kind == "transfer" and plan.sparse:
        pairs += (*_unless_in(caps.host_formats, "host_format", config.host_format),)
    yield from map(", ".join, pairs)
    most, got = caps.max_group, model.group_size
    if most is not None and got > most:
        yield f"takes at most {most} query heads for each kv-head, got {got}"
    yield from _query_reasons(entry, config)
    if caps.needs_index and model.indexer is None:
        yield "selects by the model's own indexer, and this model has none"
    if entry.kind != "backend":
        return
    if model.softcap is not None and not caps.softcap:
        yield f"does not cap attention logits, and the model does, at {model.softcap}"
    for stage in plan.stages:
        lacking = [option for option in stage.options if option not in caps.options]
        if lacking:
            yield (
                f"has no {', '.join(lacking)}, which stage {stage.name!r} asks of attention: "
                "choose another backend, or leave the stage out"
            )
    if config.kv_format not in caps.kv_formats:
        read = ", ".join(caps.kv_formats)
        yield f"reads rows of kv_format {read}, got {shown(config.kv_format)}"
    if plan.residency == "streamed" and config.device.type == "cuda" and not caps.host_memory:
        yield "cannot read mapped host memory, so no layer can be streamed: make it resident"


def queries_at_once(plan: LayerPlan, most: int | None, config: LoweredConfig) -> int:
    """Return how many queries of a row the plugins of a layer are given at once.

    Args:
        plan: plan of the layer.
        most: those that its backend takes; None for any number.
        config: the settings that hold for all layers.
    """
    queries = config.max_queries
    if config.verification == "joint" or (not plan.sparse and (most is None or most >= queries)):
        return queries
    return 1


def _query_reasons(entry: PluginEntry, config: LoweredConfig) -> Iterator[str]:
    """Yield the reason of a plugin against the queries that it would be given at once."""
    most, got = entry.capabilities.queries, config.max_queries
    singly = config.verification == "exact" and entry.kind != "transfer"
    if entry.kind in QUERIED and not singly and most is not None and got > most:
        change = "lower it" if entry.kind == "transfer" else "set verification to 'exact'"
        yield f"takes at most {most} queries a row at once, got max_queries {got}: {change}"


def _unless_in(
    offered: tuple[object, ...] | None, name: str, value: object
) -> Iterator[tuple[str, str]]:
    if offered is not None and value not in offered:  # None offers any
        yield f"takes {name} {', '.join(map(str, offered)) or 'none'}", f"got {value}"
