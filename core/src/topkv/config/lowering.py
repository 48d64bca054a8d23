"""From what a user wrote to what plugins receive, checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm
from typing import Any

import torch
from attrs import evolve

from topkv.config.layer_plans import LayerPlan, base_algorithm, dense_layers, plan_layers, rules_of
from topkv.config.layers import show_ranges
from topkv.config.lowered import LoweredConfig, LoweredGroup, Setting, in_tokens
from topkv.config.negotiation import (
    Ask,
    capability_reasons,
    geometry_reasons,
    host_reasons,
    impl_reasons,
    model_reasons,
    shape_reasons,
    sharing_reasons,
)
from topkv.config.sources import COMPUTED, DEFAULT, Plugins, Source, Sources
from topkv.config.sparse import SparseConfig
from topkv.config.values import clean
from topkv.errors import CONFIG_REFUSED, ConfigError
from topkv.kv.layout import lay_out
from topkv.kv.rows import format_reasons, row_format
from topkv.messages import shown
from topkv.plugins import PluginRegistry
from topkv.types import GroupShape, ModelShape

MAX_TOKENS = 32768
PREFILL_BLOCK = 8192


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
    work = _Lowering(model, torch.device(device), Plugins(registry, reasons))
    work.read(config, {} if checkpoint is None else checkpoint)
    work.plan()
    work.settle(max_positions)
    work.negotiate()
    return work.build()


class _Lowering:
    """The stages of ``lower``; a stage adds to ``reasons`` and goes on with a default."""

    def __init__(self, model: ModelShape, device: torch.device, plugins: Plugins) -> None:
        self.model, self.device = model, device
        self.plugins, self.reasons = plugins, plugins.reasons
        self.settings: list[Setting] = []

    def _set(self, name: str, default: Any, origin: str = DEFAULT) -> Any:
        """Resolve a value and keep it with its origin."""
        setting = self.sources.get(name, default, origin)
        self.settings.append(setting)
        return setting.value

    def _computed(self, name: str, value: Any) -> None:
        self.settings.append(Setting(name, value, COMPUTED))

    def read(self, config: SparseConfig, checkpoint: Mapping[str, Any]) -> None:
        user = Source("user", clean(config.as_dict(), self.reasons))
        if not isinstance(checkpoint, Mapping):
            self.reasons.append(f"checkpoint: topkv must be a mapping, got {shown(checkpoint)}")
            checkpoint = {}
        advice = clean(checkpoint, self.reasons, "checkpoint: ")
        if "dense_layers" in user.values:
            # Overrides stand above dense_layers, but what a checkpoint advises not above the user.
            advice.pop("layers", None)
        self.sources = Sources((user, Source("checkpoint", advice)))

    def plan(self) -> None:
        """Choose the plugins and what each layer does."""
        written, layers = self.sources, self.model.num_layers
        rules = rules_of(written.find("layers"), layers, self.reasons)
        base = base_algorithm(rules, written, self.plugins)
        name = base.value if base else None
        if base:
            self.settings.append(base)
        elif written.find("params"):
            self.reasons.append(
                "params are set and no single algorithm is; move them into the layers overrides"
            )
        if name:
            self.sources = self.sources.under(self.plugins.defaults("algorithm", name))
        backend = self.plugins.choose("backend", self.sources)
        self.backend: str | None = backend.value if backend else None
        if backend:
            self.settings.append(backend)
            self.plugins.get("backend", backend.value)
            self.sources = self.sources.under(self.plugins.defaults("backend", backend.value))
        self.transfer: str = self._plugin("transfer", "zero_copy")
        self.eviction: str = self._plugin("eviction", "lru")
        dense = dense_layers(self.sources, layers, self.reasons)
        self.settings.append(dense)
        residency = self._set("dense_residency", "resident")
        self.plans = plan_layers(
            rules, name, dense.value, residency, written, self.plugins, self.backend
        )
        # One for all layers: that of the base algorithm stands above those of overrides.
        for algorithm in dict.fromkeys(plan.algorithm for plan in self.plans):
            stated = self.plugins.defaults("algorithm", algorithm)
            only = {key: value for key, value in stated.values.items() if key == "topk"}
            self.sources = self.sources.under(Source(stated.origin, only))
        self.topk: str = self._plugin("topk", "radix")
        self._keep_plan_settings()

    def _plugin(self, kind: str, default: str) -> str:
        name: str = self._set(kind, default)
        origin = self.settings[-1].origin
        if self.plugins.get(kind, name) is None and origin not in ("user", "checkpoint", DEFAULT):
            self.reasons.append(
                f"{origin} asks for {kind} {name!r}: reinstall it with what it depends on, or "
                f"set {kind}"
            )
        self.sources = self.sources.under(self.plugins.defaults(kind, name))
        return name

    def _keep_plan_settings(self) -> None:
        """The first sparse layers under plain names, others under their layers if they differ."""
        first: dict[str, Setting] = {}
        for layers, plan in self._alike():
            if plan.residency != "sparse":
                continue
            if not first:
                first = {setting.name: setting for setting in plan.settings}
                self.settings += plan.settings
                continue
            where = show_ranges(layers)
            if plan.algorithm:
                self._computed(f"layers[{where}].algorithm", plan.algorithm)
            self.settings += [
                Setting(f"layers[{where}].{setting.name}", setting.value, setting.origin)
                for setting in plan.settings
                if first.get(setting.name) != setting
            ]

    def _alike(self) -> list[tuple[list[int], LayerPlan]]:
        """Layers with equal plans, by first layer."""
        alike: list[tuple[list[int], LayerPlan]] = []
        for layer, plan in enumerate(self.plans):
            for layers, known in alike:
                if known == plan:
                    layers.append(layer)
                    break
            else:
                alike.append(([layer], plan))
        return alike

    def settle(self, max_positions: int | None) -> None:
        """Resolve the values that hold for all layers."""
        units = [plan.unit for plan in self.plans if plan.residency == "sparse"]
        step = lcm(*units)
        ring = -(-max(32, 2 * max(units, default=1)) // step) * step
        self.page: int = self._set("page_tokens", 64)
        self.ring: int = self._set("ring_tokens", ring, f"{DEFAULT}: two of the largest unit")
        kernels = "triton" if self.device.type == "cuda" else "reference"
        self.impl: str = self._set("impl", kernels, f"{DEFAULT} on {self.device.type}")
        self.reasons += impl_reasons(self.impl, self.device)
        self.max_requests: int = self._set("max_requests", 8)
        wanted = self.sources.find("max_request_tokens")
        tokens = max(max_positions or MAX_TOKENS, wanted.value if wanted else 0)
        origin = "positions of the model" if tokens == max_positions else DEFAULT
        self.max_tokens: int = self._set("max_tokens", tokens, origin)
        request: int = self._set("max_request_tokens", self.max_tokens, f"{DEFAULT}: max_tokens")
        if request > self.max_tokens:
            self.reasons.append(
                f"max_request_tokens must be at most max_tokens, got {request} and "
                f"{self.max_tokens}"
            )
        self.max_request_tokens = -(-request // self.page) * self.page
        self.num_pages = -(-self.max_tokens // self.page) + self.max_requests + 1
        self._computed("num_pages", self.num_pages)
        self.kv_format: str = self._set("kv_format", "model")
        self.reasons += format_reasons(self.model, self.kv_format)
        self.host_layout: str = self._set("host_layout", "page_head")
        self.host_memory: int | None = self._set("host_memory", None)
        self.device_memory: int | None = self._set("device_memory", None)
        self.resident_fast_path: bool = self._set("resident_fast_path", True)
        self.poison: bool = self._set("poison", False)
        block = max(PREFILL_BLOCK // self.page, 1) * self.page
        self.prefill_block: int = self._set("prefill_block_tokens", block)
        if self.prefill_block % self.page:
            self.reasons.append(
                f"prefill_block_tokens must be a multiple of page_tokens, got "
                f"{self.prefill_block} and {self.page}"
            )

    def _chosen(self, plan: LayerPlan) -> int:
        """What the algorithm selects: the budget less the tail unit, and no more than a request
        can reach."""
        tokens: int = min(plan.budget - plan.unit, self.max_request_tokens)
        return tokens // plan.selects

    def _select(self, plan: LayerPlan) -> int:
        """K: the units that this can lie in."""
        units: int = self.max_request_tokens // plan.unit
        return min(self._chosen(plan), units)

    def negotiate(self) -> None:
        """Sizes against each other, and every group against its plugins."""
        self.capturable = True
        for layers, plan in self._alike():
            sparse = plan.residency == "sparse"
            unit, scope = (plan.unit, plan.scope or "") if sparse else (self.page, "shared")
            ask = Ask(
                *(self.model, layers, unit, scope, self.impl, plan.residency, self.device),
                self.kv_format,
                plan.regranulate,
                self.plugins.selects_tokens(plan.algorithm),
            )
            if sparse:
                self.reasons += geometry_reasons(
                    *(unit, plan.selects, plan.budget, plan.buffer, self.ring, self.page),
                    self._select(plan),
                    f"(layers {show_ranges(layers)})",
                )
            for kind, name in self._asked(plan):
                record = self.plugins.get(kind, name)
                if record is not None and record.entry is not None:
                    self.capturable &= record.entry.capabilities.capture
                    asked = evolve(ask, unit=plan.selects) if kind == "algorithm" else ask
                    self.reasons += capability_reasons(record, asked)
        self._computed("capturable", self.capturable)

    def _asked(self, plan: LayerPlan) -> list[tuple[str, str]]:
        asked = [("algorithm", plan.algorithm), ("backend", self.backend)]
        asked.append(("transfer", self.transfer))
        if plan.residency == "sparse":
            asked += [("eviction", self.eviction), ("topk", self.topk)]
        return [(kind, name) for kind, name in asked if name]

    def _shape(self, layers: Sequence[int], plan: LayerPlan) -> GroupShape:
        sparse, heads = plan.residency == "sparse", self.model.num_kv_heads
        unit = plan.unit if sparse else self.page
        lanes = heads if plan.scope == "kv_head" else 1
        rows = row_format(self.model, self.kv_format)
        return GroupShape(
            layers=tuple(layers),
            unit=unit,
            lane_heads=lanes,
            heads_per_lane=heads // lanes,
            head_dim=rows.dim,
            dtype=rows.dtype,
            page_tokens=self.page,
            max_requests=self.max_requests,
            max_units=self.max_request_tokens // unit,
            select=self._select(plan) if sparse else 0,
            buffer_slots=plan.buffer // unit,
            ring_slots=self.ring // unit if sparse else 0,
            residency=plan.residency,
            planes=rows.planes,
        )

    def _group(self, layers: Sequence[int], plan: LayerPlan) -> LoweredGroup:
        shape = seen = self._shape(layers, plan)
        if plan.selects != plan.unit:
            seen = in_tokens(shape, self._chosen(plan))
        indexed = self.plugins.needs_index(plan.algorithm)
        return LoweredGroup(shape, plan.algorithm, plan.params, plan.budget, seen, indexed)

    def build(self) -> LoweredConfig:
        """Make the groups, check their bytes, and raise if anything was wrong so far."""
        groups = [self._group(layers, plan) for layers, plan in self._alike()]
        for group in groups:
            self.reasons += shape_reasons(group.shape, group.seen, self.num_pages)
        self.reasons += sharing_reasons(self.model, groups)
        on_host = [group.shape for group in groups if group.shape.residency != "resident"]
        _, size = lay_out(on_host, self.host_layout, self.num_pages)
        self._computed("host_pool_bytes", size)
        self.reasons += host_reasons(
            size, self.host_memory, self.num_pages, self.max_requests, self.page
        )
        if self.reasons or self.backend is None:
            raise ConfigError(CONFIG_REFUSED, dict.fromkeys(self.reasons))
        return LoweredConfig(
            impl=self.impl,
            device=self.device,
            model=self.model,
            groups=tuple(groups),
            backend=self.backend,
            transfer=self.transfer,
            eviction=self.eviction,
            topk=self.topk,
            max_requests=self.max_requests,
            max_tokens=self.max_tokens,
            max_request_tokens=self.max_request_tokens,
            page_tokens=self.page,
            num_pages=self.num_pages,
            kv_format=self.kv_format,
            host_layout=self.host_layout,
            host_memory=self.host_memory,
            device_memory=self.device_memory,
            resident_fast_path=self.resident_fast_path,
            poison=self.poison,
            prefill_block_tokens=self.prefill_block,
            capturable=self.capturable,
            settings=tuple(self.settings),
        )
