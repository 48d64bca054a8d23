"""Whether plugins, model and geometry fit each other; every check gives reasons, none raises."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch
from attrs import frozen

from topkv.config.layers import show_ranges
from topkv.config.lowered import LoweredGroup
from topkv.discovery import PluginRecord
from topkv.messages import shown
from topkv.ops.topk import MAX_COLUMNS
from topkv.types import GroupShape, ModelShape

READERS = ("algorithm", "backend")
_TRUE = ("1", "true", "t", "yes", "y", "on")
MAX_SELECT = 2**15  # the plan packs two counts into 32 bits
_MAX_ID = 2**31


@frozen
class Ask:
    """What a group asks of its plugins.

    Attributes:
        unit: of the algorithm, the unit that it selects; of the others, the group's.
        regranulate: the user allows it.
        single_tokens: the algorithm selects nothing else.
    """

    model: ModelShape
    layers: Sequence[int]
    unit: int
    scope: str
    impl: str
    residency: str
    device: torch.device
    kv_format: str = "model"
    regranulate: bool = False
    single_tokens: bool = False

    @property
    def where(self) -> str:
        return f"(layers {show_ranges(self.layers)}, {self.residency})"


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


def capability_reasons(record: PluginRecord, ask: Ask) -> list[str]:
    """What a plugin does not offer of what a group asks."""
    return [f"{record.who} {text} {ask.where}" for text in _refusals(record, ask)]


def _refusals(record: PluginRecord, ask: Ask) -> Iterator[str]:
    if record.entry is None:
        return
    caps, model = record.entry.capabilities, ask.model
    dtype = str(model.dtype).removeprefix("torch.")
    if caps.units and not caps.units[0] <= ask.unit <= caps.units[1]:
        # A dense layer is read page by page.
        key = "unit" if ask.residency == "sparse" else "page_tokens"
        low, high = caps.units
        mend = _regranulation(record.kind, ask, low)
        yield f"takes units of {low} to {high} tokens, got {ask.unit}: change {key}{mend}"
    choices = (
        ("scope", ask.scope, caps.scopes),
        # What moves and evicts rows does not look into them.
        ("attention", model.attention, caps.attention if record.kind in READERS else None),
        ("impl", ask.impl, record.entry.impls),
        ("dtype", dtype, caps.dtypes),
        ("head_dim", model.head_dim, caps.head_dims),
    )
    for name, value, offered in choices:
        if offered is not None and value not in offered:
            shown = ", ".join(map(str, offered)) or "none"
            yield f"takes {name} {shown}, got {value}"
    if caps.max_group is not None and model.group_size > caps.max_group:
        yield (
            f"takes at most {caps.max_group} query heads for each kv-head, got {model.group_size}"
        )
    if caps.needs_index and model.indexer is None:
        yield "selects by the model's own indexer, and this model has none"
    if caps.needs_index and ask.unit != 1 and ask.residency == "sparse":
        mend = _regranulation(record.kind, ask, 1)
        yield f"selects by one index key a token, got unit {ask.unit}: set unit to 1{mend}"
    if record.kind == "backend":
        if ask.kv_format not in caps.kv_formats:
            shown = ", ".join(caps.kv_formats)
            yield f"reads rows of kv_format {shown}, got {ask.kv_format}"
        if model.softcap is not None and not caps.softcap:
            yield f"does not cap attention logits, and the model does, at {model.softcap}"
        if not caps.lse:
            yield "returns no log-sum-exp, and prefill merges blocks of history by it"
        if ask.residency == "streamed" and ask.device.type == "cuda" and not caps.host_memory:
            yield "cannot read mapped host memory, so no layer can be streamed: make it resident"


def _regranulation(kind: str | None, ask: Ask, least: int) -> str:
    """What regranulation would do about a unit that a plugin does not take.

    Args:
        least: smallest unit that the plugin takes.
    """
    if ask.residency != "sparse" or kind not in READERS:
        return ""
    if ask.single_tokens:
        helps = not ask.regranulate and (kind == "algorithm" or ask.unit < least)
        return ", or allow it: regranulate=True" if helps else ""
    vain = ask.regranulate and kind == "algorithm"
    return "; regranulate is for algorithms that select single tokens" if vain else ""


def geometry_reasons(
    unit: int,
    selects: int,
    budget: int,
    buffer: int,
    ring: int,
    page: int,
    select: int,
    where: str,
) -> list[str]:
    """What is wrong with the sizes of sparse layers; tokens, but for ``select`` in units.

    ``selects`` is the unit of the algorithm: ``unit``, or 1 where selections are regranulated.
    """
    reasons = []
    least, what, scattered = unit + selects, "two units", ""
    if selects != unit:
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


def host_reasons(
    size: int, limit: int | None, num_pages: int, max_requests: int, page: int
) -> list[str]:
    if limit is None or size <= limit:
        return []
    tokens = (limit * num_pages // size - max_requests - 1) * page
    mend = f"lower max_tokens to {tokens}" if tokens > 0 else "lower max_requests"
    return [
        f"the host pool needs {size} bytes ({size / 2**30:.3g} GiB) and host_memory allows "
        f"{limit} ({limit / 2**30:.3g} GiB); raise host_memory or {mend}"
    ]
