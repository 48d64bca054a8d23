"""The setting ``storage``, and quotas of the storage and of the host pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, fields, frozen

from topkv.config import checks
from topkv.config.checks import clean, need, one_of
from topkv.messages import shown

WRITES = ("write_through", "write_through_selective", "write_back")
ANYBODY = "*"
"""Name that stands for all tenants without a quota of their own."""

FETCHES = ("timeout", "wait_complete", "best_effort")


def seconds(value: Any) -> float:
    right = type(value) in (int, float) and 0 <= value <= 86400
    need(right, "be a number of seconds, at most a day", value)
    return float(value)


def limit(value: Any) -> float:
    """Check the time limit of a call: with 0 seconds every call would count as hung."""
    right = type(value) in (int, float) and 0 < value <= 86400
    need(right, "be a number of seconds above 0, at most a day", value)
    return float(value)


def quotas(value: Any) -> dict[str, int]:
    """A check: gives bytes by tenant, or raises ``Refused`` with every reason."""
    right = isinstance(value, Mapping) and value and all(isinstance(name, str) for name in value)
    need(bool(right), "be a mapping of tenants such as {'acme': '4GiB', '*': '1GiB'}", value)
    good, reasons = {}, []
    for name, size in value.items():
        try:
            need(checks.is_text(name), "be a name that UTF-8 has", name)
            good[name] = checks.byte_size(size)
        except ValueError as error:
            reasons.append(f": {shown(name)} {error}")
    if reasons:
        raise checks.Refused(reasons, None)
    return good


def _optional(check: checks.Check) -> checks.Check:
    return lambda value: None if value is None else check(value)


def _key(check: checks.Check, default: Any) -> Any:
    return field(default=default, metadata={"check": check})


@frozen(kw_only=True)
class StorageSettings:
    """The setting ``storage``, checked.

    Attributes:
        name: of the plugin.
        params: of the plugin: a mapping of those that are set, or the instance once lowered.
        write: when pages go to it: ``"write_through"`` when they are published,
            ``"write_through_selective"`` when they are published or found for the second time,
            ``"write_back"`` when the host pool gives them up, or the coordinator is closed.
        fetch: how long a prompt waits for its pages: ``"timeout"``, ``"wait_complete"``, or
            ``"best_effort"``, which takes what a prefetch has brought by then.
        wait_s, wait_s_per_1k: seconds of ``"timeout"``: the first, and the second for every 1,024
            tokens that were asked for.
        least_tokens: the storage is not asked for fewer tokens.
        limit_s: seconds after which a single call counts as hung, whatever the policy.
        queue: bytes of copies that may wait to be stored; what is beyond is not stored.
        quotas: most bytes of each tenant in it, ``"*"`` for those that are not named; None for any
            number. The plugin has to keep quotas.
    """

    name: str = _key(checks.plugin, "")
    params: Any = _key(checks.parameters, {})  # noqa: RUF009  (it gives a field)
    write: str = _key(one_of(WRITES), "write_through")
    fetch: str = _key(one_of(FETCHES), "timeout")
    wait_s: float = _key(seconds, 1.0)
    wait_s_per_1k: float = _key(seconds, 0.25)
    least_tokens: int = _key(checks.count, 256)
    limit_s: float = _key(limit, 30.0)
    queue: int = _key(checks.byte_size, 4 << 30)
    quotas: Mapping[str, int] | None = _key(_optional(quotas), None)

    def __str__(self) -> str:
        return f"{self.name}, {self.write}, {self.fetch}"


_CHECKS = {each.name: each.metadata["check"] for each in fields(StorageSettings)}


def storage(value: Any) -> StorageSettings:
    """A check: gives the settings, or raises ``Refused`` with every reason."""
    if isinstance(value, StorageSettings):
        return value
    need(isinstance(value, Mapping), "be a mapping such as {'name': 'files'}", value)
    reasons: list[str] = []
    good = clean(value, _CHECKS, reasons, ": ")
    if "name" not in value:
        reasons.append(": name is missing; name a plugin of kind storage")
    if reasons:
        raise checks.Refused(reasons, None)
    return StorageSettings(**good)
