"""Models that can be attached, and their geometry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from topkv.config.layers import show_ranges
from topkv.plugins import PluginRegistry
from topkv.types import ModelShape
from topkv_transformers import blocks, latent_support
from topkv_transformers.classes import GROUPS, group_of
from topkv_transformers.names import HANDLE
from topkv_transformers.stock import FULL, STOCK, layer_types

LATENT = ("latent", "indexer")
"""Groups of models with latent attention; the latter select for themselves."""

OWN_LAYERS = {"indexer": latent_support.LAYER_TYPES, "blocks": {blocks.LAYER_TYPE, FULL}}
"""Types of the layers of models that select for themselves."""


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The module that runs the layers and sees cache, mask and inputs of a forward."""
    return getattr(model, model.base_model_prefix, model)


def is_latent(model: PreTrainedModel) -> bool:
    """Return True if a model has latent attention."""
    return group_of(model) in LATENT


def refusals(model: object, on_meta: bool = False) -> list[str]:
    """Every reason why a model cannot be attached.

    Args:
        model: whatever a user has.
        on_meta: the model has no weights, and what needs them or a place is not looked at.
    """
    if not isinstance(model, PreTrainedModel):
        expected = "expected a transformers PreTrainedModel, got"
        return [f"{expected} {type(model).__qualname__}{_inside(model)}"]
    reasons = []
    if group_of(model) is None:
        reasons.append(_unknown(model))
        if model.config.get_text_config() is not model.config:
            return reasons  # all else that could be asked for is a level deeper
    else:
        wrong = _module_refusals(model)
        if wrong:
            return reasons + wrong  # there is no attention to look at further
    latent = is_latent(model)
    reasons += _config_refusals(model.config.get_text_config(), group_of(model))
    modules = attention_modules(model)
    geometry = latent_support.geometry if latent else _geometry
    if len({geometry(module) for module in modules}) > 1:
        reasons.append("the attention layers differ in head_dim, heads or scaling; expected alike")
    reasons += [] if on_meta else _place_refusals(model, modules)
    if reasons:  # what runs a module needs one that is sound otherwise
        return reasons
    if latent:
        return latent_support.layer_refusals(modules, on_meta)
    return blocks.layer_refusals(modules, on_meta) if group_of(model) == "blocks" else []


def _inside(model: object) -> str:
    """Say where the model is within a wrapper, of PEFT say; empty if there is none."""
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    for place, module in modules:
        if isinstance(module, PreTrainedModel):
            return (
                f", which wraps a {type(module).__qualname__}: attach that, "
                f"topkv.attach(model.{place}); adapters of PEFT are modules within it and stay"
            )
    return ""


def _place_refusals(model: PreTrainedModel, modules: list[nn.Module]) -> list[str]:
    """Reasons against the devices of the attention layers, or that they are attached already."""
    reasons = []
    devices = {parameter.device for module in modules for parameter in module.parameters()}
    if len(devices) > 1 or torch.device("meta") in devices:
        places = sorted(str(device) for device in devices)
        reasons.append(f"attention layers lie on {places}; expected one device with real weights")
    reasons += _device_refusals(devices)
    if hasattr(decoder_of(model), HANDLE):
        reasons.append("the model is attached already; call detach() of its handle first")
    return reasons


def _unknown(model: PreTrainedModel) -> str:
    """Return why a class is refused that is not listed, and how to go on."""
    config, name = model.config.get_text_config(), type(model).__name__
    text = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if config is not model.config and text in GROUPS:
        return (
            f"class {name} wraps a model of text, which is served by itself, for prompts of text: "
            "with torch.device('meta'): "
            f"text = transformers.{text}(model.config.get_text_config()); then "
            "text.model = model.get_decoder(), text.lm_head = model.get_output_embeddings(), and "
            "text is what to attach and to generate with"
        )
    return (
        f"class {name} is not supported: nobody has compared it with its stock model. "
        "topkv_transformers.classes lists those that were; to ask for another, open an issue with "
        "its config.json, or add its name there and run test_models.py"
    )


def _device_refusals(devices: set[torch.device]) -> list[str]:
    """Refuse devices that are not current: kernels are launched on the current device alone."""
    cuda = {device.index for device in devices if device.type == "cuda"}
    if len(cuda) != 1 or cuda == {torch.cuda.current_device()}:
        return []
    (index,) = cuda
    return [
        f"the attention layers lie on cuda:{index} and the current device is "
        f"cuda:{torch.cuda.current_device()}; call torch.cuda.set_device({index}) first"
    ]


def _config_refusals(config: Any, group: str | None) -> list[str]:
    latent, known = group in LATENT, OWN_LAYERS.get(group or "")

    def has(name: str) -> bool:
        return getattr(config, name, None) is not None

    reasons = []
    if getattr(config, "is_encoder_decoder", False):
        reasons.append("encoder-decoder models are not supported")
    if known is not None:
        others = sorted(set(getattr(config, "layer_types", None) or ()) - known)
        if others:
            expected = " or ".join(map(repr, sorted(known)))
            reasons.append(f"layer types {others} are not supported; expected {expected} alone")
    else:
        reasons += _layer_refusals(config)
    if has("attention_chunk_size"):
        reasons.append("chunked attention (attention_chunk_size) is not supported")
    if has("attn_logit_softcapping") and group != "softcap":
        reasons.append("softcap of attention logits (attn_logit_softcapping) is not supported")
    if group == "softcap" and config._attn_implementation == "sdpa":
        reasons.append(
            "layers that slide keep attn_implementation='sdpa', which does not cap; load the "
            "model with attn_implementation='eager'"
        )
    if has("kv_lora_rank") and not latent:
        reasons.append("latent attention (kv_lora_rank) of this class is not supported")
    if has("index_topk") and group != "indexer":
        reasons.append("DSA models, which bring an indexer (index_topk), are not supported")
    if not getattr(config, "is_causal", True):
        reasons.append("bidirectional attention (is_causal=False) is not supported")
    return reasons


def _layer_refusals(config: Any) -> list[str]:
    """Refuse layers that are neither ours nor may stand beside ours, and models without ours."""
    types = layer_types(config)
    others = sorted(set(types) - STOCK - {FULL})
    if others:
        return [f"layer types {others} are not supported; expected {FULL!r} or {sorted(STOCK)}"]
    if FULL in types:
        return []
    if getattr(config, "layer_types", None):
        return [f"no layer attends to everything, all are {sorted(set(types))}: nothing to serve"]
    return [
        f"sliding-window attention (sliding_window={config.sliding_window}) is not supported in "
        "all layers, unless the window holds all positions (max_position_embeddings="
        f"{getattr(config, 'max_position_embeddings', None)}); set config.sliding_window=None "
        "before the model is made to attend to everything"
    ]


def _module_refusals(model: PreTrainedModel) -> list[str]:
    """Reasons why the modules of a class that is served do not stand where its code makes them."""
    layers: Any = getattr(decoder_of(model), "layers", ())
    count = decoder_of(model).config.num_hidden_layers
    if len(layers) != count:
        return [f"the model has {len(layers)} layers and its config {count}; expected as many"]
    places: dict[nn.Module, list[int]] = {}
    for place, layer in enumerate(layers):
        places.setdefault(layer, []).append(place)
    reasons = [
        f"layers {each} are one module, whose keys and values would be mixed up; expected one "
        "for each"
        for each in places.values()
        if len(each) > 1
    ]
    needs = ("scaling", "kv_lora_rank" if is_latent(model) else "head_dim")
    wrapped: dict[str, list[int]] = {}
    for place, (kind, layer) in enumerate(layers_of(model)):
        module = _attention_of(layer)
        if kind == FULL and not all(hasattr(module, name) for name in needs):
            inside = f"{type(module).__qualname__} in it" if module else "none in it"
            wrapped.setdefault(f"{type(layer).__qualname__} with {inside}", []).append(place)
        elif kind == FULL and getattr(module, "layer_idx", place) not in places[layer]:
            reasons.append(
                f"layer {place}: expected layer_idx {place} of its attention, by which a cache "
                f"keeps layers apart, got {module.layer_idx}"
            )
    return reasons + [
        f"layers {show_ranges(each)}: expected decoder layers with their attention in self_attn "
        f"or mixer, got {found}; a layer or attention inside another module is not served: "
        "attach the model without it, hooks can do what it does"
        for found, each in wrapped.items()
    ]


def layers_of(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Kind and module of each layer."""
    decoder = decoder_of(model)
    layers: Any = getattr(decoder, "layers", ())
    if is_latent(model) or group_of(model) == "blocks":
        return [(FULL, layer) for layer in layers]
    return list(zip(layer_types(decoder.config), layers, strict=False))


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The attention modules of the layers that topkv serves, in order."""
    full = [layer for kind, layer in layers_of(model) if kind == FULL]
    modules = map(_attention_of, full)
    return [module for module in modules if isinstance(module, nn.Module)]


def _attention_of(layer: nn.Module) -> Any:
    """The attention module of a layer, None where it has none."""
    return getattr(layer, "self_attn", getattr(layer, "mixer", None))


def left_alone(model: PreTrainedModel) -> set[nn.Module]:
    """All modules of the layers that keep what the model gives them."""
    others = [layer for kind, layer in layers_of(model) if kind != FULL]
    return {module for layer in others for module in layer.modules()}


def _geometry(module: nn.Module) -> tuple[Any, ...]:
    names = ("head_dim", "num_key_value_groups", "scaling")
    return tuple(getattr(module, name, None) for name in names)


def shape_of(model: PreTrainedModel) -> ModelShape:
    """Geometry of the attention layers of a model that ``refusals`` has passed."""
    config, modules = model.config.get_text_config(), attention_modules(model)
    if is_latent(model):
        return latent_support.latent_shape(modules, model.dtype)
    return ModelShape(
        num_layers=len(modules),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=modules[0].head_dim,
        dtype=model.dtype,
        scale=modules[0].scaling,
        softcap=getattr(config, "attn_logit_softcapping", None),
        indexer=blocks.indexer_shape(modules) if group_of(model) == "blocks" else None,
    )


def device_of(model: PreTrainedModel) -> torch.device:
    """The device of the attention layers."""
    return next(attention_modules(model)[0].parameters()).device


def advice_of(model: PreTrainedModel, registry: PluginRegistry) -> Any:
    """Settings that a model recommends, by names of ``SparseConfig``; its own words beat ours.

    A recommendation that is no mapping goes on as it was written, for ``lower`` to refuse.
    """
    advise = {"indexer": latent_support.advice, "blocks": blocks.advice}.get(group_of(model) or "")
    ours = advise(model.config, registry) if advise else {}
    own = getattr(model.config, "topkv", None)
    if own is None:
        return ours
    return {**ours, **own} if isinstance(own, Mapping) else own
