"""Whether a checkpoint can be attached, told from its ``config.json`` alone.

The model is made on the device ``meta``, so that its modules are there and none of its weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from attrs import field, frozen
from transformers import AutoConfig, PreTrainedModel

from topkv.config import LoweredConfig, SparseConfig
from topkv.errors import TopkvError
from topkv.plugins import PluginRegistry
from topkv.prediction.machine import Machine
from topkv.prediction.step import StepModel
from topkv_transformers.classes import group_of
from topkv_transformers.engine import lower_for
from topkv_transformers.stock import FULL
from topkv_transformers.support import decoder_of, layers_of, refusals


@frozen
class Examination:
    """What became of it.

    Attributes:
        model: name of the class.
        group: of ``classes.CLASSES``; None if the class is not served.
        refused: every reason why it cannot be attached; empty if it can.
        layers: of each layer of the model what is done with it: sparse, resident or streamed, by
            the settings; "served" where there are none; else its kind, and that it is left alone.
        bytes: of one request of the length that was asked for: on the ``device`` and the ``host``
            through topkv, and on the device in the stock model; empty without settings.
        not_counted: what ``bytes`` leaves out.
    """

    model: str
    group: str | None
    refused: Sequence[str]
    layers: Sequence[str] = ()
    bytes: Mapping[str, int] = field(factory=dict)
    not_counted: Sequence[str] = ()


def examine(
    directory: str | Path,
    settings: SparseConfig | Mapping[str, Any] | None,
    length: int,
    registry: PluginRegistry,
) -> Examination:
    """Look at a checkpoint. Reads nothing but its configuration, and runs no code of it.

    Args:
        directory: that of ``config.json``.
        settings: with which it would be attached, see ``SparseConfig.load``; None to leave bytes
            out.
        length: tokens of a request.
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
    name = (config.architectures or [type(config).__name__])[0]
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        return Examination(name, None, [f"Transformers {transformers.__version__} has no {name}"])
    with torch.device("meta"):
        model = kind._from_config(config, dtype=config.dtype or torch.get_default_dtype())
    reasons, layers = refusals(model, on_meta=True), layers_of(model)
    if reasons:
        return Examination(name, group_of(model), reasons)
    kinds = ["served" if each == FULL else f"left alone: {each}" for each, _ in layers]
    if settings is None:
        return Examination(name, group_of(model), [], kinds)
    try:
        lowered = _lower(model, SparseConfig.load(settings), length, registry)
        held = StepModel.of(lowered, Machine(memory=1.0, link=1.0), registry=registry).held(length)
    except TopkvError as error:
        return Examination(name, group_of(model), getattr(error, "reasons", [str(error)]), kinds)
    done = {layer: each.shape.residency for each in lowered.groups for layer in each.shape.layers}
    ordinals = iter(range(len(done)))
    kinds = [done[next(ordinals)] if each == "served" else each for each in kinds]
    windows = window_bytes(model, length)
    counted = {"device": held.device + windows, "host": held.host, "stock_device": held.resident}
    counted["stock_device"] += windows
    return Examination(name, group_of(model), [], kinds, counted, _not_counted(layers))


def _not_counted(layers: Sequence[tuple[str, Any]]) -> list[str]:
    states = {"linear_attention", "conv"} & {kind for kind, _ in layers}
    return [f"the states of {each} layers" for each in sorted(states)]


def _lower(
    model: PreTrainedModel, settings: SparseConfig, length: int, registry: PluginRegistry
) -> LoweredConfig:
    """The configuration on this machine's kind of device, for a request of that length."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return lower_for(model, settings, registry, device=device, length=length)


def window_bytes(model: PreTrainedModel, length: int) -> int:
    """Bytes of keys and values of one row in layers that slide, between steps."""
    config, total = decoder_of(model).config, 0
    for kind, layer in layers_of(model):
        if kind == "sliding_attention":
            heads = config.num_attention_heads // layer.self_attn.num_key_value_groups
            row = 2 * heads * layer.self_attn.head_dim * model.dtype.itemsize
            total += row * min(length, config.sliding_window - 1)
    return total
