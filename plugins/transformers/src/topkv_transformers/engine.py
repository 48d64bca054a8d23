"""The engine entry: asks whether a model can be attached, and attaches it."""

from __future__ import annotations

import warnings
from functools import cache
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedModel

from topkv import SparseCoordinator, hookimpl
from topkv.config import LoweredConfig, SparseConfig, lower
from topkv.errors import CONFIG_REFUSED, CapabilityError, ConfigError
from topkv.hooks.engine import EngineSetup
from topkv.plugins import PluginRegistry
from topkv_authoring.tested import never_tested
from topkv_transformers import capture, compiled
from topkv_transformers.prediction import report
from topkv_transformers.session import AttachedModel
from topkv_transformers.stock import covering_window
from topkv_transformers.support import advice_of, decoder_of, device_of, refusals, shape_of


def lower_for(
    model: PreTrainedModel,
    config: SparseConfig,
    registry: PluginRegistry,
    *,
    device: torch.device | None = None,
    length: int = 0,
) -> LoweredConfig:
    """See ``topkv.config.lower``.

    Args:
        model: a model that ``support.refusals`` has passed.
        config: what the user set.
        registry: where plugins are looked up.
        device: in place of the model's own, which has one only with its weights.
        length: tokens of a request that must fit, where no setting says how long one may be.

    Raises:
        ConfigError: with every reason at once.
    """
    lowered = lower(
        config,
        shape_of(model),
        device=device or device_of(model),
        registry=registry,
        checkpoint=advice_of(model, registry),
        max_positions=max(length, getattr(model.config, "max_position_embeddings", None) or 0),
    )
    longest, window = lowered.max_request_tokens, covering_window(decoder_of(model).config)
    if window is not None and longest > window:
        whole = window // lowered.page_tokens * lowered.page_tokens
        raise ConfigError(
            CONFIG_REFUSED,
            [
                f"max_request_tokens: expected at most sliding_window = {window}, beyond which "
                f"all layers of the model slide, in whole pages, got {longest}; set it to {whole}"
            ],
        )
    return lowered


def check_compiled(model: PreTrainedModel, lowered: LoweredConfig) -> None:
    """Raise CapabilityError if layers are to be compiled where steps are not captured."""
    if lowered.compile:
        decoder = decoder_of(model)
        reasons = capture.refusals(decoder, lowered) + compiled.refusals(decoder, lowered)
        if reasons:
            raise CapabilityError("compile: true cannot be served", reasons)


PACKAGES = ("topkv", "topkv-transformers")
"""Distributions that say which versions of torch, triton and Transformers were tested."""


@cache
def warn_of_versions() -> None:
    """Warn of versions that were never tested with this engine, once in a process."""
    for sentence in chain.from_iterable(map(never_tested, PACKAGES)):
        warnings.warn(
            f"{sentence}; compare with the stock model, or install one of those", stacklevel=4
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
        as does what a model with an indexer was trained to select. The logger ``topkv`` gets the
        predicted time of a step, level ``INFO``. A ``UserWarning``, once in a process, names what
        is installed in a version that was never tested.

        Raises:
            CapabilityError: the model is refused, a plugin cannot serve it, or layers are to be
                compiled where steps are not captured.
            ConfigError, PluginError: the configuration is wrong.
            HostMemoryError, DeviceMemoryError: a tier is too small.
        """
        warn_of_versions()
        reasons = refusals(model)
        if reasons:
            raise CapabilityError(f"{type(model).__name__} cannot be attached", reasons)
        lowered = lower_for(model, config, self.registry)
        check_compiled(model, lowered)
        handle = AttachedModel(model, SparseCoordinator(lowered, self.registry))
        try:
            reasons = handle.prefixes.refusals()
            if reasons:
                raise CapabilityError("pages: prefixes cannot be served", reasons)
            report(handle)
        except BaseException:
            handle.detach()
            raise
        return handle
