"""The engine entry: asks whether a model can be attached, and attaches it."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from topkv import SparseCoordinator, hookimpl
from topkv.config import LoweredConfig, SparseConfig, lower
from topkv.errors import CapabilityError
from topkv.hooks.engine import EngineSetup
from topkv.plugins import PluginRegistry
from topkv_transformers import capture, compiled
from topkv_transformers.prediction import tell
from topkv_transformers.session import AttachedModel
from topkv_transformers.support import advice_of, decoder_of, device_of, refusals, shape_of


def lower_for(
    model: PreTrainedModel, config: SparseConfig, registry: PluginRegistry
) -> LoweredConfig:
    """See ``topkv.config.lower``.

    Raises:
        ConfigError: with every reason at once.
    """
    return lower(
        config,
        shape_of(model),
        device=device_of(model),
        registry=registry,
        checkpoint=advice_of(model, registry),
        max_positions=getattr(model.config, "max_position_embeddings", None),
    )


class TransformersEngine:
    """Attaches causal language models of Transformers, see ``classes.CLASSES``.

    Args:
        setup: where algorithms and backends are looked up.
    """

    def __init__(self, setup: EngineSetup) -> None:
        self.registry = setup.registry

    @hookimpl
    def refusals(self, model: object) -> list[str]:
        """See ``topkv.hooks.engine.Engine``."""
        return refusals(model)

    @hookimpl
    def attach(self, model: PreTrainedModel, config: Any) -> AttachedModel:
        """See ``topkv.hooks.engine.Engine``.

        A dict ``topkv`` in the model's own config stands between topkv's defaults and ``config``,
        as does what a model with an indexer was trained to select. What a step will take is told
        to the logger ``topkv``, level ``INFO``.

        Raises:
            CapabilityError: the model is refused, a plugin cannot serve it, or layers are to be
                compiled where steps are not captured.
            ConfigError, PluginError: the configuration is wrong.
            HostMemoryError, DeviceMemoryError: a tier is too small.
        """
        reasons = refusals(model)
        if reasons:
            raise CapabilityError(f"{type(model).__name__} cannot be attached", reasons)
        lowered = lower_for(model, config, self.registry)
        if lowered.compile:
            decoder = decoder_of(model)
            reasons = capture.refusals(decoder, lowered) + compiled.refusals(decoder, lowered)
        if reasons:
            raise CapabilityError("compile: true cannot be served", reasons)
        handle = AttachedModel(model, SparseCoordinator(lowered, self.registry))
        try:
            reasons = handle.prefixes.refusals()
            if reasons:
                raise CapabilityError(
                    f"prefix_cache: {lowered.prefix_cache} cannot be served", reasons
                )
            tell(handle)
        except BaseException:
            handle.detach()
            raise
        return handle
