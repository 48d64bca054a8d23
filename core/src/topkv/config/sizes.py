"""Sizes against each other and against what kernels can count; reasons are given, none raised."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import torch

from topkv.checks import MOST
from topkv.config.lowered import LoweredConfig, LoweredGroup
from topkv.messages import shown
from topkv.types import MAX_COLUMNS, ModelShape, newest_units

_TRUE = ("1", "true", "t", "yes", "y", "on")
MAX_SELECT = 2**15  # the plan packs two counts into 32 bits


def model_reasons(model: ModelShape) -> Iterator[str]:
    """Reasons against the geometry of a model; empty where it can be served."""
    names = ["num_layers", "num_heads", "num_kv_heads", "head_dim"]
    names += [] if model.value_dim is None else ["value_dim"]
    sizes = {name: getattr(model, name) for name in names}
    wrong = {k: size for k, size in sizes.items() if type(size) is not int or size <= 0}
    for name, size in wrong.items():
        yield f"the model's {name} must be a positive int, got {shown(size)}"
    if not wrong and model.num_heads % model.num_kv_heads:
        yield (
            f"the model's num_heads must be a multiple of num_kv_heads, got {model.num_heads} "
            f"and {model.num_kv_heads}"
        )
    if not 0 <= model.first_layer <= (model.total_layers or MOST) - model.num_layers:
        yield (
            f"the model's first_layer must be from 0 on, with all {model.num_layers} layers among "
            f"the {model.total_layers} of the whole model, got {model.first_layer}"
        )
    latent = model.attention == "mla"
    if latent and (model.num_kv_heads != 1 or model.out_dim > model.head_dim):
        yield (
            "a model with latent attention has one kv-head, whose values are the first elements "
            f"of its rows; got num_kv_heads {model.num_kv_heads}, head_dim {model.head_dim}, "
            f"value_dim {model.out_dim}"
        )
    if not latent and model.out_dim != model.head_dim:
        yield f"keys and values must have one head_dim, got {model.head_dim} and {model.out_dim}"


def impl_reasons(impl: str, device: torch.device) -> Iterator[str]:
    """Kernels need Triton, and run on a CPU in Triton's interpreter only."""
    if impl == "triton" and find_spec("triton") is None:
        yield (
            f"impl 'triton' on {device.type} needs triton, which is not installed: "
            "pip install triton, or set impl to 'reference'"
        )
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in _TRUE
    if impl == "triton" and device.type == "cpu" and not interpreted:
        yield (
            "impl 'triton' runs on a CPU only under Triton's interpreter: set the environment "
            "variable TRITON_INTERPRET=1 before Python starts, or set impl to 'reference'"
        )


def group_reasons(group: LoweredGroup, buffer: int, config: LoweredConfig) -> Iterator[str]:
    """Reasons against the sizes of a group; the caller adds its layers to each.

    Args:
        buffer: tokens of the LRU buffer of a lane, as they were set.
    """
    shape, selected_as = group.shape, group.selected_as
    if shape.residency == "sparse":
        yield from _selection_reasons(group, buffer, config)
    if shape.entry_bytes % 16:
        yield (
            f"an entry must be a multiple of 16 bytes, got {shape.entry_bytes}: "
            f"{shape.heads_per_lane} kv-heads x {shape.planes} planes (K and V) x {shape.unit} "
            f"tokens x head_dim {shape.head_dim} x {shape.dtype.itemsize} bytes; "
            "take a larger unit"
        )
    ids = {
        "device slots": shape.max_lanes * shape.slots,
        "host units": config.num_pages * selected_as.units_per_page,
    }
    for name, count in ids.items():
        if count > MOST:
            yield (
                f"{name} must be fewer than 2**31 in a layer, got {count}; lower max_requests, "
                "max_tokens or buffer, or take a larger unit"
            )


def _selection_reasons(group: LoweredGroup, buffer: int, config: LoweredConfig) -> Iterator[str]:
    shape, selected_as, budget = group.shape, group.selected_as, group.budget
    unit, select, slots = shape.unit, shape.select, shape.buffer_slots
    page, ring = config.page_tokens, config.ring_tokens
    least, least_named, scattered = unit + selected_as.unit, "two units", ""
    if group.regrained:
        least_named = "a unit and a token"
        scattered = f" (each of {budget - unit} tokens may lie in one of its own)"
    if unit & (unit - 1):
        yield f"unit must be a power of two, got {unit}"
    elif page % unit:
        yield f"unit must divide page_tokens, got unit {unit} and page_tokens {page}"
    if budget < least:
        yield (
            f"budget must be at least {least_named} ({least} tokens: one selected and the tail), "
            f"got {budget}"
        )
    least_ring = unit * newest_units(config.max_queries + 1, unit)
    if ring % unit or ring < least_ring:
        yield (
            "ring_tokens must be a multiple of the unit and hold the open unit with "
            f"max_queries = {config.max_queries} tokens behind it: at least {least_ring}, got "
            f"{ring} with unit {unit}"
        )
    if select > slots:
        yield (
            f"buffer must hold the selection: {select} units of {unit} tokens{scattered}, got "
            f"{buffer} tokens = {slots} units; raise buffer to {select * unit} or lower budget"
        )
    if select >= MAX_SELECT:
        yield (
            f"a selection must stay below {MAX_SELECT} units, got {select}; take a larger unit "
            "or lower budget"
        )
    if selected_as.max_units > MAX_COLUMNS:
        yield (
            f"an algorithm ranks at most {MAX_COLUMNS} units of a request, got "
            f"{selected_as.max_units} of {selected_as.unit} tokens; lower max_request_tokens, or "
            "take a larger unit where the algorithm selects whole units"
        )


def sharing_reasons(model: ModelShape, group: LoweredGroup) -> Iterator[str]:
    """Reasons against layers that would share a selection which no layer of their group makes."""
    layers = group.shape.layers if group.indexed else ()
    for layer in layers:
        until = range(layer + 1)
        making = [n for n in until if model.indexer is None or model.indexer.selects_for(n)]
        if not making:
            yield (
                f"layer {layer} has no indexer, and there is no layer before it to share with; "
                "make it dense"
            )
        elif making[-1] not in layers:
            yield (
                f"layer {layer} shares the selection of layer {making[-1]}, so both must be "
                "sparse with equal settings; name both in dense_layers or layers, or neither"
            )


def host_reasons(size: int, config: LoweredConfig) -> Iterator[str]:
    """The reason against a host pool of ``size`` bytes, where the user allows fewer."""
    limit = config.host_memory
    if limit is None or size <= limit:
        return
    tokens = (limit * config.num_pages // size - config.max_requests - 1) * config.page_tokens
    fix = f"lower max_tokens to {tokens}" if tokens > 0 else "lower max_requests"
    yield (
        f"the host pool needs {size} bytes ({size / 2**30:.3g} GiB) and host_memory allows "
        f"{limit} ({limit / 2**30:.3g} GiB); raise host_memory or {fix}"
    )
