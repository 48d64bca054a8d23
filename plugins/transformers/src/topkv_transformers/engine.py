"""The engine entry: asks whether a model can be attached, and attaches it."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from topkv import SparseCoordinator, hookimpl
from topkv.config import lower
from topkv.errors import CapabilityError
from topkv.plugins import PluginRegistry
from topkv.plugins import registry as default_registry
from topkv_transformers.session import AttachedModel
from topkv_transformers.support import device_of, refusals, shape_of


class TransformersEngine:
    """Attaches causal language models of Transformers, see ``support.MODEL_CLASSES``.

    Args:
        registry: where algorithms and backends are looked up; the process-wide one by default.
    """

    def __init__(self, registry: PluginRegistry | None = None) -> None:
        self.registry = registry or default_registry()

    @hookimpl
    def refusals(self, model: object) -> list[str]:
        """See ``topkv.hooks.engine.refusals``."""
        return refusals(model)

    @hookimpl
    def attach(self, model: PreTrainedModel, config: Any) -> AttachedModel:
        """See ``topkv.hooks.engine.attach``.

        A dict ``topkv`` in the model's own config stands between topkv's defaults and ``config``.

        Raises:
            CapabilityError: the model is refused, or a plugin cannot serve it.
            ConfigError, PluginError: the configuration is wrong.
            HostMemoryError, DeviceMemoryError: a tier is too small.
        """
        reasons = refusals(model)
        if reasons:
            raise CapabilityError(f"{type(model).__name__} cannot be attached", reasons)
        lowered = lower(
            config,
            shape_of(model),
            device=device_of(model),
            registry=self.registry,
            checkpoint=getattr(model.config, "topkv", None),
            max_positions=model.config.max_position_embeddings,
        )
        return AttachedModel(model, SparseCoordinator(lowered, self.registry))
