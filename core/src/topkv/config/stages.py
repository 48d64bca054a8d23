"""The settings ``stages`` and ``observers``: plugins in order, with their parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from attrs import field, frozen

from topkv.config import checks
from topkv.config.checks import Refused, clean, need
from topkv.messages import shown


@frozen(repr=False)
class ObserverSettings:
    """One entry of the setting ``observers``, checked.

    Attributes:
        name: of the plugin.
        params: of the plugin: a mapping of those that are set, or the instance once lowered.
    """

    name: str
    params: Any = field(factory=dict)

    def __repr__(self) -> str:
        if not isinstance(self.params, Mapping):
            return f"{self.name}({str(self.params).partition('(')[2]}"
        given = ", ".join(f"{name}={value!r}" for name, value in sorted(self.params.items()))
        return f"{self.name}({given})"


@frozen(repr=False)
class StageSettings(ObserverSettings):
    """One entry of the setting ``stages``, checked.

    Attributes:
        options: of attention that the plugin asks of the backend; known once lowered.
    """

    options: tuple[str, ...] = ()


Settings = TypeVar("Settings", bound=ObserverSettings)


def options_of(asked: Iterable[StageSettings]) -> dict[str, Any]:
    """The options of attention that stages ask of their backend, with the parameters of each."""
    return {option: stage.params for stage in asked for option in stage.options}


def option_reasons(asked: Iterable[StageSettings]) -> Iterator[str]:
    """Reasons against stages of one group that ask for the same option: it has one value."""
    found = [(option, stage.name) for stage in asked for option in stage.options]
    for option, count in Counter(option for option, _ in found).items():
        if count > 1:
            names = ", ".join(repr(name) for each, name in found if each == option)
            yield f"option {option!r} of attention is set by {count} stages, {names}; leave one"


MOST = 8
"""Stages of a group, and observers of a coordinator."""

_KEYS: Mapping[str, checks.Check] = {"name": checks.plugin, "params": checks.parameters}


def stages(value: Any) -> tuple[StageSettings, ...]:
    """A check: gives the stages in order, or raises ``Refused`` with every reason."""
    return _listed(value, StageSettings)


def observers(value: Any) -> tuple[ObserverSettings, ...]:
    """A check: gives the observers in order, or raises ``Refused`` with every reason."""
    found = _listed(value, ObserverSettings)
    need(len({each.name for each in found}) == len(found), "name each plugin once", value)
    return found


def _listed(value: Any, cls: type[Settings]) -> tuple[Settings, ...]:
    listed = isinstance(value, (list, tuple))
    need(listed, "be a list of names, or of mappings with name and params", value)
    need(len(value) <= MOST, f"name at most {MOST} plugins", value)
    reasons: list[str] = []
    found = [_plugin(item, cls, f"[{number}]", reasons) for number, item in enumerate(value)]
    good = tuple(each for each in found if each)
    if reasons:
        raise Refused(reasons, good)
    return good


def _plugin(item: Any, cls: type[Settings], where: str, reasons: list[str]) -> Settings | None:
    if isinstance(item, cls):
        return item
    asked = {"name": item} if isinstance(item, str) else item
    if not isinstance(asked, Mapping) or "name" not in asked:
        reasons.append(f"{where} must be a name or a mapping with name, got {shown(item)}")
        return None
    good = clean(asked, _KEYS, reasons, f"{where} ")
    return cls(**good) if "name" in good else None
