"""Sizes against each other and against what kernels can count; reasons are given, none raised."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from topkv.config.layers import show_ranges
from topkv.config.lowered import LoweredConfig, LoweredGroup
from topkv.config.plans import LayerPlan
from topkv.messages import shown
from topkv.ops.topk import MAX_COLUMNS
from topkv.types import GroupShape, ModelShape

_TRUE = ("1", "true", "t", "yes", "y", "on")
MAX_SELECT = 2**15  # the plan packs two counts into 32 bits
_MAX_ID = 2**31


def model_reasons(model: ModelShape) -> list[str]:
    sizes = {
        "num_layers": model.num_layers,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "value_dim": 1 if model.value_dim is None else model.value_dim,
    }
    reasons = [
        f"the model's {name} must be a positive int, got {shown(value)}"
        for name, value in sizes.items()
        if type(value) is not int or value <= 0
    ]
    if not reasons and model.num_heads % model.num_kv_heads:
        reasons.append(
            f"the model's num_heads must be a multiple of num_kv_heads, got {model.num_heads} "
            f"and {model.num_kv_heads}"
        )
    latent = model.attention == "mla"
    if latent and (model.num_kv_heads != 1 or model.out_dim > model.head_dim):
        reasons.append(
            "a model with latent attention has one kv-head, whose values are the first elements "
            f"of its rows; got num_kv_heads {model.num_kv_heads}, head_dim {model.head_dim}, "
            f"value_dim {model.out_dim}"
        )
    if not latent and model.out_dim != model.head_dim:
        reasons.append(
            f"keys and values must have one head_dim, got {model.head_dim} and {model.out_dim}"
        )
    return reasons


def impl_reasons(impl: str, device: torch.device) -> list[str]:
    """Triton kernels run on a CPU in Triton's interpreter only."""
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in _TRUE
    if impl == "triton" and device.type == "cpu" and not interpreted:
        return [
            "impl 'triton' runs on a CPU only under Triton's interpreter: set the environment "
            "variable TRITON_INTERPRET=1 before Python starts, or set impl to 'reference'"
        ]
    return []


def plan_reasons(plan: LayerPlan, config: LoweredConfig, where: str) -> list[str]:
    """What is wrong with the sizes of sparse layers."""
    unit, budget, buffer = plan.unit, plan.budget, plan.buffer
    page, ring = config.page_tokens, config.ring_tokens
    select = plan.select(config.max_request_tokens)
    reasons = []
    least, what, scattered = unit + plan.selects, "two units", ""
    if plan.selects != unit:
        what = "a unit and a token"
        scattered = f" (regranulated, each of {budget - unit} tokens may lie in one of its own)"
    if unit & (unit - 1):
        reasons.append(f"unit must be a power of two, got {unit} {where}")
    elif page % unit:
        reasons.append(
            f"unit must divide page_tokens, got unit {unit} and page_tokens {page} {where}"
        )
    if budget < least:
        reasons.append(
            f"budget must be at least {what} ({least} tokens: one selected and the tail), "
            f"got {budget} {where}"
        )
    if ring % unit or ring < 2 * unit:
        reasons.append(
            f"ring_tokens must be a multiple of the unit and at least two units, got "
            f"{ring} with unit {unit} {where}"
        )
    if select > buffer // unit:
        reasons.append(
            f"buffer must hold the selection: {select} units of {unit} tokens{scattered}, got "
            f"{buffer} tokens = {buffer // unit} units; raise buffer to {select * unit} or "
            f"lower budget {where}"
        )
    if select >= MAX_SELECT:
        reasons.append(
            f"a selection must stay below {MAX_SELECT} units, got {select}; "
            f"take a larger unit or lower budget {where}"
        )
    return reasons


def shape_reasons(shape: GroupShape, seen: GroupShape, num_pages: int) -> list[str]:
    """What is wrong with a group, and with what its algorithm sees of it."""
    where = f"(layers {show_ranges(shape.layers)})"
    reasons = []
    if shape.entry_bytes % 16:
        reasons.append(
            f"an entry must be a multiple of 16 bytes, got {shape.entry_bytes}: "
            f"{shape.heads_per_lane} kv-heads x {shape.planes} planes (K and V) x {shape.unit} "
            f"tokens x head_dim {shape.head_dim} x {shape.dtype.itemsize} bytes; "
            f"take a larger unit {where}"
        )
    if shape.residency == "sparse" and seen.max_units > MAX_COLUMNS:
        reasons.append(
            f"an algorithm ranks at most {MAX_COLUMNS} units of a request, got {seen.max_units} "
            f"of {seen.unit} tokens; lower max_request_tokens, or take a larger unit where the "
            f"algorithm selects whole units {where}"
        )
    ids = {
        "device slots": shape.rows * shape.slots,
        "host units": num_pages * seen.units_per_page,
    }
    for name, count in ids.items():
        if count >= _MAX_ID:
            reasons.append(
                f"{name} must be fewer than 2**31 in a layer, got {count}; lower max_requests, "
                f"max_tokens or buffer, or take a larger unit {where}"
            )
    return reasons


def sharing_reasons(model: ModelShape, groups: Sequence[LoweredGroup]) -> list[str]:
    """Which layers would share a selection that is not made, or not for them."""
    group_of = {
        layer: number
        for number, group in enumerate(groups)
        for layer in group.shape.layers
        if group.indexed
    }
    reasons, source = [], None
    for layer in range(model.num_layers):
        if model.indexer is None or model.indexer.selects_for(layer):
            source = layer
        elif layer not in group_of:
            continue
        elif source is None:
            reasons.append(
                f"layer {layer} has no indexer, and there is no layer before it to share with; "
                "make it dense"
            )
        elif group_of[layer] != group_of.get(source):
            reasons.append(
                f"layer {layer} shares the selection of layer {source}, so both must be sparse "
                "with equal settings; name both in dense_layers or layers, or neither"
            )
    return reasons


def host_reasons(size: int, config: LoweredConfig) -> list[str]:
    """Whether a host pool of ``size`` bytes is more than the user allows."""
    limit = config.host_memory
    if limit is None or size <= limit:
        return []
    tokens = (limit * config.num_pages // size - config.max_requests - 1) * config.page_tokens
    mend = f"lower max_tokens to {tokens}" if tokens > 0 else "lower max_requests"
    return [
        f"the host pool needs {size} bytes ({size / 2**30:.3g} GiB) and host_memory allows "
        f"{limit} ({limit / 2**30:.3g} GiB); raise host_memory or {mend}"
    ]
