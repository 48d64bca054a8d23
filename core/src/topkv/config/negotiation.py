"""Whether a plugin offers what a group of layers asks of it; reasons are given, none raised.

``topkv plugins --matrix`` lists what goes with what by the same check, and therefore nothing here
imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import frozen

from topkv.entries import Capabilities, PluginEntry

if TYPE_CHECKING:
    from topkv.config.lowered import LoweredConfig

READERS = ("algorithm", "backend")
"""Kinds that look into rows; others move and evict them."""


@frozen(kw_only=True)
class Ask:
    """What a group of layers asks of a plugin.

    Attributes:
        attention: ``"gqa"`` or ``"mla"``.
        scope: of ``SCOPES``.
        unit: of the algorithm, the unit that it selects; of the others, the group's.
        residency: ``"sparse"``, ``"resident"`` or ``"streamed"``.
        regranulate: the user allows it.
        single_tokens: the algorithm selects nothing else.
    """

    attention: str
    scope: str
    unit: int
    residency: str = "sparse"
    regranulate: bool = False
    single_tokens: bool = False


def refusals(kind: str, caps: Capabilities, ask: Ask) -> Iterator[tuple[str, str]]:
    """What a plugin of a kind refuses of attention, scope and unit, whatever the model: what it
    takes instead, and what it got with how to change that."""
    sparse = ask.residency == "sparse"
    if kind in READERS:
        yield from _unless_in(caps.attention, "attention", ask.attention)
    yield from _unless_in(caps.scopes, "scope", ask.scope)
    low, high = caps.units or (ask.unit, ask.unit)
    if not low <= ask.unit <= high:
        # A dense layer is read page by page.
        change = f"change {'unit' if sparse else 'page_tokens'}{_regranulation(kind, ask, low)}"
        yield f"takes units of {low} to {high} tokens", f"got {ask.unit}: {change}"
    if caps.needs_index and ask.unit != 1 and sparse:
        change = f"set unit to 1{_regranulation(kind, ask, 1)}"
        yield "selects by one index key a token", f"got unit {ask.unit}: {change}"


def model_refusals(entry: PluginEntry, residency: str, config: LoweredConfig) -> Iterator[str]:
    """What a plugin refuses of the model, the device and what was set for all layers."""
    model, caps = config.model, entry.capabilities
    dtype = str(model.dtype).removeprefix("torch.")
    choices = (
        *_unless_in(entry.impls, "impl", config.impl),
        *_unless_in(caps.dtypes, "dtype", dtype),
        *_unless_in(caps.head_dims, "head_dim", model.head_dim),
    )
    yield from map(", ".join, choices)
    most, got = caps.max_group, model.group_size
    if most is not None and got > most:
        yield f"takes at most {most} query heads for each kv-head, got {got}"
    if caps.needs_index and model.indexer is None:
        yield "selects by the model's own indexer, and this model has none"
    if entry.kind != "backend":
        return
    if model.softcap is not None and not caps.softcap:
        yield f"does not cap attention logits, and the model does, at {model.softcap}"
    if config.kv_format not in caps.kv_formats:
        yield f"reads rows of kv_format {', '.join(caps.kv_formats)}, got {config.kv_format}"
    if not caps.lse:
        yield "returns no log-sum-exp, and prefill merges blocks of history by it"
    if residency == "streamed" and config.device.type == "cuda" and not caps.host_memory:
        yield "cannot read mapped host memory, so no layer can be streamed: make it resident"


def _unless_in(
    offered: tuple[object, ...] | None, name: str, value: object
) -> Iterator[tuple[str, str]]:
    if offered is not None and value not in offered:  # None offers any
        yield f"takes {name} {', '.join(map(str, offered)) or 'none'}", f"got {value}"


def _regranulation(kind: str, ask: Ask, least: int) -> str:
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
