"""Options of the command as objects: algorithms with parameters, budgets, dense layers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from attrs import fields_dict

from topkv.config.layers import parse_ranges
from topkv.entries import PluginEntry
from topkv.errors import ConfigError, PluginError
from topkv.plugins import PluginRegistry

EXACT, ALL_CHANNELS = "exact", "double_sparsity"
SETTINGS = ("unit", "scope", "buffer", "eviction", "host_format", "stages", "share")
"""Keys behind an algorithm that set topkv, unless the algorithm has a parameter of that name."""

LEAST_BUFFER = 256


@dataclass(frozen=True)
class Choice:
    """One algorithm of a comparison.

    Attributes:
        label: name of the row: the text before ``@``, or all that was written.
        name: name of the plugin.
        unit: tokens of a unit.
        settings: further settings of ``SparseConfig``.
        params: parameters of the algorithm.
    """

    label: str
    name: str
    unit: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)

    def budget(self, share: float, context: int) -> int:
        """Return ``share`` of the context, rounded up to whole units."""
        # A product such as 0.05 * 16384 * (1 + 1e-16) must not gain a unit.
        units = ceil(round(share * context, 6) / self.unit)
        return max(1, units) * self.unit

    def buffer(self, budget: int, reach: int) -> int:
        """Return the buffer's tokens: twice the budget, but no more than a request can reach."""
        wanted = self.settings.get("buffer", max(2 * budget, LEAST_BUFFER))
        return int(min(-(-wanted // self.unit) * self.unit, max(reach, budget)))


def split_algorithms(text: str) -> list[str]:
    """Split ``"a:x=1,y=2,b"`` into ``["a:x=1,y=2", "b"]``: a part without a name goes on."""
    parts: list[str] = []
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        goes_on = "=" in piece and ":" not in piece.split("=", 1)[0]
        if goes_on and parts:
            parts[-1] += ("," if ":" in parts[-1] else ":") + piece
        else:
            parts.append(piece)
    return parts


def installed(text: str, registry: PluginRegistry) -> str:
    """Keep the algorithms of a list whose packages are there; all where none is."""
    names = {record.name for record in registry.usable("algorithm")}
    names |= {EXACT} if ALL_CHANNELS in names else set()
    parts = split_algorithms(text)
    return ",".join([part for part in parts if part.partition(":")[0] in names] or parts)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"None": None, "True": True, "False": False}.get(text, text)


def _names(entry: PluginEntry | None) -> Mapping[str, Any]:
    """The parameters of a plugin."""
    return fields_dict(entry.parameters) if entry else {}


def read_stages(text: str, registry: PluginRegistry) -> list[dict[str, Any]]:
    """Read ``"top_p/p=0.95/widen=2+other"`` as the setting ``stages``, with parameters.

    Raises:
        PluginError: there is no such stage, or it has no such parameter; with every reason.
    """
    found, reasons = [], []
    for part in text.split("+"):
        name, *pairs = (word.strip() for word in part.split("/"))
        params = {}
        try:
            entry = registry.get("stage", name).entry
            known = sorted(_names(entry))
        except PluginError as error:
            reasons += [f"{str(error).splitlines()[0]} {reason}" for reason in error.reasons]
            continue
        for key, equals, value in (pair.partition("=") for pair in pairs):
            params[key] = _value(value)
            if not equals or key not in known:
                expected = " or ".join(f"{each}=value" for each in known) or "no parameters"
                reasons.append(
                    f"stage {name!r}: expected {expected}, got {key + equals + value!r}"
                )
        found.append({"name": name, "params": params})
    if reasons:
        raise PluginError("the stages are refused", reasons)
    return found


def read_algorithms(texts: Sequence[str], head_dim: int, registry: PluginRegistry) -> list[Choice]:
    """Read algorithms, each with its parameters: ``row@name:key=value,key=value``.

    ``row@`` names the row of the comparison and may be left out.

    ``exact`` is double_sparsity with all channels: the exact top-k of query times key.

    Raises:
        ConfigError: with everything that is wrong.
    """
    reasons: list[str] = []
    choices: list[Choice] = []
    for text in (part for given in texts for part in split_algorithms(given)):
        head, _, rest = text.partition(":")
        row, named, name = head.rpartition("@")
        if named and not row:
            reasons.append(f"{text!r}: expected the row's name before @, got nothing")
        values: dict[str, Any] = {}
        for pair in filter(None, rest.split(",")):
            key, equals, value = pair.partition("=")
            if not equals or not key.strip():
                reasons.append(f"{text!r}: expected key=value behind the colon, got {pair!r}")
            values[key.strip()] = _value(value.strip())
        if name == EXACT:
            name, values = ALL_CHANNELS, {"channels": head_dim, "label": "bf16", **values}
        try:
            entry = registry.get("algorithm", name).entry
        except PluginError as error:
            reasons += [f"{str(error).splitlines()[0]} {reason}" for reason in error.reasons]
            continue
        own = _names(entry)
        settings = {key: values.pop(key) for key in SETTINGS if key in values and key not in own}
        if "stages" in settings:
            try:
                settings["stages"] = read_stages(str(settings["stages"]), registry)
            except PluginError as error:
                reasons += [f"{text!r}: {reason}" for reason in error.reasons]
        unit = settings.pop("unit", (entry.defaults if entry else {}).get("unit", 16))
        if type(unit) is not int or unit < 1:
            reasons.append(f"{text!r}: unit must be an integer of 1 or more, got {unit!r}")
            continue
        choices.append(Choice(row or text, name, unit, settings, values))
    labels = [choice.label for choice in choices]
    reasons += [
        f"{label!r} is named twice; give the rows different names, as in first@quest"
        for label in sorted({label for label in labels if labels.count(label) > 1})
    ]
    if not choices and not reasons:
        reasons.append("expected at least one, such as quest")
    if reasons:
        raise ConfigError("--algorithms is refused", dict.fromkeys(reasons))
    return choices


def read_budgets(text: str) -> list[float]:
    """Read ``"1%,2.5%"`` as shares.

    Raises:
        ConfigError: one of them is no percentage above 0 and up to 100.
    """
    shares: list[float] = []
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        try:
            share = float(piece.removesuffix("%")) / 100
        except ValueError:
            share = 0.0
        if not piece.endswith("%") or not 0 < share <= 1:
            raise ConfigError(
                "--budgets is refused",
                [f"expected shares of the context such as 1%,2.5%, up to 100%, got {piece!r}"],
            )
        shares.append(share)
    if not shares:
        raise ConfigError("--budgets is refused", ["expected at least one, such as 5%"])
    return shares


def read_dense_layers(text: str, layers: int) -> tuple[int, ...]:
    """Read ``"none"``, or layers as in ``"0-1"``, ``"0,5"`` or ``"4-"``.

    Raises:
        ConfigError: it is none of these, or names a layer that the model does not have.
    """
    if text == "none":
        return ()
    try:
        ranges = parse_ranges(text)
    except ValueError as error:
        raise ConfigError("--dense-layers is refused", [f"{error}, or none"]) from error
    named = {
        layer
        for first, last in ranges
        for layer in range(first, (layers - 1 if last is None else last) + 1)
    }
    if not named or max(named) >= layers:
        raise ConfigError(
            "--dense-layers is refused",
            [f"{text!r} names layers that the model lacks; it has layers 0 to {layers - 1}"],
        )
    return tuple(sorted(named))
