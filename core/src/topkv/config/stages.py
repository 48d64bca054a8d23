"""Plugins that settings name with their parameters: ``stages`` behind the algorithm, in order,
``observers``, and ``pages`` of a keeper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from attrs import field, frozen

from topkv import checks
from topkv.checks import Refused, clean, need
from topkv.messages import shown


@frozen(repr=False)
class Named:
    """A plugin and its parameters, checked.

    Attributes:
        name: of the plugin.
        params: of the plugin: a mapping of those that are set, or the instance once lowered.
    """

    name: str
    params: Any = field(factory=dict)

    def __repr__(self) -> str:
        if isinstance(self.params, Mapping):  # there may be a password in one
            return f"{self.name}({', '.join(f'{name}=...' for name in sorted(self.params))})"
        return f"{self.name}({str(self.params).partition('(')[2]}"


N = TypeVar("N", bound=Named)


@frozen(repr=False)
class StageSettings(Named):
    """One entry of the setting ``stages``, checked.

    Attributes:
        name, params: as of ``Named``.
        options: of attention that the plugin asks of the backend; known once lowered.
        regrains: it turns tokens into units; known once lowered.
    """

    options: tuple[str, ...] = ()
    regrains: bool = False


def option_reasons(asked: Iterable[StageSettings]) -> Iterator[str]:
    """Reasons against stages of one group that ask for the same option: it has one value."""
    found = [(option, stage.name) for stage in asked for option in stage.options]
    for option, count in Counter(option for option, _ in found).items():
        if count > 1:
            names = ", ".join(repr(name) for each, name in found if each == option)
            yield f"option {option!r} of attention is set by {count} stages, {names}; leave one"


def regrain_reasons(
    asked: Sequence[StageSettings], unit: int, algorithm: str | None, single_tokens: bool
) -> Iterator[str]:
    """Reasons against a stage that regrains: it is the last one, behind an algorithm that selects
    single tokens, and its units are larger."""
    for place, stage in enumerate(asked):
        if not stage.regrains:
            continue
        behind = ", ".join(repr(each.name) for each in asked[place + 1 :])
        who = f"stage {stage.name!r} turns tokens into units"
        if behind:
            yield f"{who}, so no stage can stand behind it, got {behind}; list it last, once"
        if algorithm and not single_tokens:
            yield (
                f"{who}, and algorithm {algorithm!r} does not select single tokens alone; leave "
                "the stage out"
            )
        elif unit == 1:
            yield f"{who} of several tokens, got unit 1; set a larger unit, or leave it out"


MOST = 8
"""Stages of a group, and observers of a coordinator."""

_KEYS: Mapping[str, checks.Check] = {"name": checks.plugin, "params": checks.parameters}


def stages(value: Any) -> tuple[StageSettings, ...]:
    """A check: gives the stages in order, or raises ``Refused`` with every reason."""
    return _listed(value, StageSettings)


def observers(value: Any) -> tuple[Named, ...]:
    """A check: gives the observers in order, or raises ``Refused`` with every reason."""
    found = _listed(value, Named)
    need(len({each.name for each in found}) == len(found), "name each plugin once", value)
    return found


def _listed(value: Any, cls: type[N]) -> tuple[N, ...]:
    listed = isinstance(value, (list, tuple))
    need(listed, "be a list of names, or of mappings with name and params", value)
    need(len(value) <= MOST, f"name at most {MOST} plugins", value)
    reasons: list[str] = []
    found = [_named(item, cls, f"[{number}]", reasons) for number, item in enumerate(value)]
    good = tuple(each for each in found if each)
    if reasons:
        raise Refused(reasons, good)
    return good


def pages(value: Any) -> str | Named:
    """A check of the setting ``pages``: gives a plugin unless the core or an engine is meant."""
    if value in ("core", "engine"):
        return str(value)
    right = isinstance(value, (str, Named)) or (isinstance(value, Mapping) and "name" in value)
    need(right, "be 'core', 'engine', the name of a plugin, or a mapping with name", value)
    reasons: list[str] = []
    found = _named(value, Named, ":", reasons)
    if found is None or reasons:
        raise Refused(reasons, "core")
    return found


def _named(item: Any, cls: type[N], where: str, reasons: list[str]) -> N | None:
    if isinstance(item, cls):
        return item
    asked = {"name": item} if isinstance(item, str) else item
    if not isinstance(asked, Mapping) or "name" not in asked:
        reasons.append(f"{where} must be a name or a mapping with name, got {shown(item)}")
        return None
    good = clean(asked, _KEYS, reasons, f"{where} ")
    return cls(**good) if "name" in good else None
