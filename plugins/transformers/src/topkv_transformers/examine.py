"""Examination of a checkpoint by its ``config.json`` alone: if it can be attached, and its bytes.

The model is made on the device ``meta``, so that its modules are there and none of its weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from attrs import evolve, field, frozen
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import GENERATION_CONFIG_NAME

from topkv.config import LoweredConfig, SparseConfig
from topkv.errors import TopkvError
from topkv.plugins import PluginRegistry
from topkv_prediction.machine import Machine
from topkv_prediction.step import StepModel
from topkv_transformers.classes import group_of
from topkv_transformers.engine import check_compiled, lower_for
from topkv_transformers.generation import refused_defaults
from topkv_transformers.stock import FULL
from topkv_transformers.support import decoder_of, layers_of, refusals, shape_of

LENGTH = 32768
"""Tokens of a request that nobody has given a length, of models with as many positions."""


@frozen
class Examination:
    """Result of an examination.

    Attributes:
        model: name of the class.
        group: of ``classes.CLASSES``; None if the class is not served.
        refused: every reason why it cannot be attached; empty if it can.
        length: tokens of the request that was looked at.
        positions: of the model; None where its configuration has no number.
        options: of its ``generation_config.json``, those that ``generate`` refuses unless they
            are given otherwise.
        layers: treatment of each layer of the model: sparse, resident or streamed, by the
            settings; "served" where there are none; else its kind, and that it is left alone.
        bytes: of one request of the length that was asked for: on the ``device`` and the ``host``
            through topkv, and on the device in the stock model; empty without settings.
        not_counted: what ``bytes`` leaves out.
    """

    model: str
    group: str | None
    refused: Sequence[str]
    length: int | None = None
    positions: int | None = None
    options: Sequence[str] = ()
    layers: Sequence[str] = ()
    bytes: Mapping[str, int] = field(factory=dict)
    not_counted: Sequence[str] = ()


def examine(
    directory: str | Path,
    settings: SparseConfig | Mapping[str, Any] | None,
    length: int | None,
    registry: PluginRegistry,
) -> Examination:
    """Look at a checkpoint. Reads nothing but its configuration, and runs no code of it.

    Args:
        directory: that of ``config.json``.
        settings: with which it would be attached, see ``SparseConfig.load``; None to leave bytes
            out, and to ask whether any installed backend serves it.
        length: tokens of a request; by default as many as the model has positions, at most
            ``LENGTH``.
        registry: where plugins are looked up.

    Raises:
        OSError, ValueError: there is no configuration that Transformers knows.
        ConfigError: the settings cannot be read.
    """
    config = AutoConfig.from_pretrained(
        directory,
        local_files_only=True,
        trust_remote_code=False,  # None would ask on standard input
    )
    name = (config.architectures or [_class_of(config)])[0]
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        return Examination(name, None, [f"Transformers {transformers.__version__} has no {name}"])
    with torch.device("meta"):
        model = kind._from_config(config, dtype=config.dtype or torch.get_default_dtype())
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    length = length or min(positions or LENGTH, LENGTH)
    found = Examination(
        name,
        group_of(model),
        refusals(model, on_meta=True),
        length,
        positions,
        _options(directory),
    )
    if found.refused:
        return found
    layers = layers_of(model)
    kinds = ["served" if each == FULL else f"left alone: {each}" for each, _ in layers]
    found = evolve(found, layers=kinds)
    if settings is None:
        return evolve(found, refused=_without_settings(model, length, registry))
    try:
        lowered, step = _step(model, SparseConfig.load(settings), length, registry)
    except TopkvError as error:
        return evolve(found, refused=_reasons(error))
    held = step.held(length)
    done = {layer: each.shape.residency for each in lowered.groups for layer in each.shape.layers}
    ordinals = iter(range(len(done)))
    kinds = [done[next(ordinals)] if each == "served" else each for each in kinds]
    windows = window_bytes(model, length)
    counted = {"device": held.device + windows, "host": held.host, "stock_device": held.resident}
    counted["stock_device"] += windows
    return evolve(found, layers=kinds, bytes=counted, not_counted=_not_counted(layers))


def _class_of(config: Any) -> str:
    """The class that Transformers takes for a configuration that names none."""
    name: str = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, type(config).__name__)
    return name


def _options(directory: str | Path) -> list[str]:
    if not (Path(directory) / GENERATION_CONFIG_NAME).exists():
        return []
    return refused_defaults(GenerationConfig.from_pretrained(directory, local_files_only=True))


def _reasons(error: TopkvError) -> list[str]:
    return list(getattr(error, "reasons", [str(error)]))


def _without_settings(model: PreTrainedModel, length: int, registry: PluginRegistry) -> list[str]:
    """Reasons why no backend that is installed serves a model; empty if one does."""
    reasons = []
    every = list(range(shape_of(model).num_layers))
    for record in registry.usable("backend"):
        try:
            _step(model, SparseConfig(backend=record.name, dense_layers=every), length, registry)
        except TopkvError as error:
            reasons += [f"{record.name}: {reason}" for reason in _reasons(error)]
        else:
            return []
    return reasons or ["no backend is installed; install a package that offers one"]


def _step(
    model: PreTrainedModel, settings: SparseConfig, length: int, registry: PluginRegistry
) -> tuple[LoweredConfig, StepModel]:
    """The configuration on this machine's kind of device, and what a step takes by it.

    Raises:
        TopkvError: attaching would be refused.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lowered = lower_for(model, settings, registry, device=device, length=length)
    check_compiled(model, lowered)
    return lowered, StepModel.of(lowered, Machine(memory=1.0, link=1.0), registry=registry)


def _not_counted(layers: Sequence[tuple[str, Any]]) -> list[str]:
    states = {"linear_attention", "conv"} & {kind for kind, _ in layers}
    return [f"the states of {each} layers" for each in sorted(states)]


def window_bytes(model: PreTrainedModel, length: int) -> int:
    """Bytes of keys and values of one row in layers that slide, between steps."""
    config, total = decoder_of(model).config, 0
    for kind, layer in layers_of(model):
        if kind == "sliding_attention":
            heads = config.num_attention_heads // layer.self_attn.num_key_value_groups
            row = 2 * heads * layer.self_attn.head_dim * model.dtype.itemsize
            total += row * min(length, config.sliding_window - 1)
    return total
