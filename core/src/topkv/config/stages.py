"""The setting ``stages``: what stands behind the algorithm, in order, with its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from topkv.config import checks
from topkv.config.checks import Refused, clean, need
from topkv.messages import shown


@frozen
class StageSettings:
    """One entry of the setting ``stages``, checked.

    Attributes:
        name: of the plugin.
        params: of the plugin; every one of them once lowered.
    """

    name: str
    params: Mapping[str, Any] = field(factory=dict)

    def __repr__(self) -> str:
        told = ", ".join(f"{name}={value!r}" for name, value in sorted(self.params.items()))
        return f"{self.name}({told})"


MOST = 8
"""Stages of a group."""

_KEYS: Mapping[str, checks.Check] = {"name": checks.plugin, "params": checks.parameters}


def stages(value: Any) -> tuple[StageSettings, ...]:
    """A check: gives the stages in order, or raises ``Refused`` with every reason."""
    listed = isinstance(value, (list, tuple))
    need(listed, "be a list of names, or of mappings such as {'name': 'rerank'}", value)
    need(len(value) <= MOST, f"name at most {MOST} stages", value)
    reasons: list[str] = []
    found = [_stage(item, f"[{number}]", reasons) for number, item in enumerate(value)]
    good = tuple(stage for stage in found if stage)
    if reasons:
        raise Refused(reasons, good)
    return good


def _stage(item: Any, where: str, reasons: list[str]) -> StageSettings | None:
    if isinstance(item, StageSettings):
        return item
    asked = {"name": item} if isinstance(item, str) else item
    if not isinstance(asked, Mapping) or "name" not in asked:
        reasons.append(f"{where} must be a name or a mapping with name, got {shown(item)}")
        return None
    values = clean(asked, _KEYS, reasons, f"{where} ")
    return StageSettings(**values) if "name" in values else None
