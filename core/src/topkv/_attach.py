"""``topkv.attach``: find the engine that takes a model, and let it attach the model."""

from __future__ import annotations

from typing import Any

from topkv.config import SparseConfig
from topkv.errors import CapabilityError, PluginError
from topkv.hooks.engine import EngineSetup
from topkv.plugins import PluginRegistry
from topkv.plugins import registry as default_registry


def attach(
    model: object,
    config: Any = None,
    *,
    engine: str | None = None,
    registry: PluginRegistry | None = None,
) -> Any:
    """Make a model decode through topkv.

    Args:
        model: a model object of some installed engine.
        config: whatever ``SparseConfig.load`` takes; None for the defaults.
        engine: name of the engine; by default the first installed one that takes the model.
        registry: where plugins are looked up; the process-wide one by default. Engines get it
            as the one argument of their factory.

    Returns:
        The engine's handle, with ``detach()``.

    Raises:
        CapabilityError: no engine takes the model; with the reasons of each.
        ConfigError, PluginError: the configuration is wrong; nothing was allocated.
        HostMemoryError, DeviceMemoryError: a tier is too small; nothing is left allocated.
    """
    registry = registry or default_registry()
    settings = SparseConfig() if config is None else SparseConfig.load(config)
    names = [engine] if engine else [record.name for record in registry.usable("engine")]
    reasons: list[str] = []
    for name in names:
        try:
            candidate = registry.create("engine", name, EngineSetup(registry))
        except PluginError as error:
            if engine:
                raise
            reasons += [f"{name}: {reason}" for reason in error.reasons]
            continue
        refused = candidate.refusals(model)
        if not refused:
            return candidate.attach(model, settings)
        reasons += [f"{name}: {reason}" for reason in refused]
    if not names:
        reasons.append("no engine is installed; install a package that offers one")
        reasons += [f"did not load: {why}" for why in registry.failed("engine")]
    raise CapabilityError(f"no engine takes this {type(model).__qualname__}", reasons)
