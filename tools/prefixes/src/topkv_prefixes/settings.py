"""Parameters of ``prefixes``: pages that are kept, their storage below host memory, quotas."""

# ruff: noqa: RUF009 (``_key`` gives a field, not a value that instances share)

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, fields, frozen

from topkv.config import checks
from topkv.config.checks import clean, near, need, one_of
from topkv.config.sources import Resolver
from topkv.errors import CONFIG_REFUSED, ConfigError
from topkv.messages import shown
from topkv.plugins import PluginRegistry
from topkv_prefixes.entry import keeps_quotas

if TYPE_CHECKING:
    from topkv.hooks.keeper import KeeperSetup

KEEPS = ("prompt", "all")
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


def by_tenant(value: Any) -> dict[str, int]:
    """A check of quotas: gives bytes by tenant, or raises ``Refused`` with every reason."""
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
        raise checks.Refused(reasons, good)
    return good


def _key(check: checks.Check, default: Any) -> Any:
    return field(default=default, metadata={"check": check})


def _checks(cls: type) -> dict[str, checks.Check]:
    return {each.name: each.metadata["check"] for each in fields(cls)}


@frozen(kw_only=True)
class StorageSettings:
    """The parameter ``storage``, checked.

    Attributes:
        name: of the plugin.
        params: of the plugin.
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
    params: Mapping[str, Any] = _key(checks.parameters, {})
    write: str = _key(one_of(WRITES), "write_through")
    fetch: str = _key(one_of(FETCHES), "timeout")
    wait_s: float = _key(seconds, 1.0)
    wait_s_per_1k: float = _key(seconds, 0.25)
    least_tokens: int = _key(checks.count, 256)
    limit_s: float = _key(limit, 30.0)
    queue: int = _key(checks.byte_size, 4 << 30)
    quotas: Mapping[str, int] | None = _key(by_tenant, None)


def _below(value: Any) -> StorageSettings:
    """A check: gives the settings, or raises ``Refused`` with every reason."""
    need(isinstance(value, Mapping), "be a mapping such as {'name': 'files'}", value)
    reasons: list[str] = []
    good = clean(value, _checks(StorageSettings), reasons, ": ")
    if "name" not in value:
        reasons.append(": name is missing; name a plugin of kind storage")
    settings = StorageSettings(**good)
    if reasons:
        raise checks.Refused(reasons, settings)
    return settings


@frozen(kw_only=True)
class PrefixSettings:
    """The parameters of ``prefixes``, checked.

    Attributes:
        keep: which pages of earlier requests with the same first tokens a prompt takes over: with
            ``"prompt"`` those of prompts, which attended to everything; with ``"all"`` those of
            generated tokens too. What is published is the caller's to decide by it.
        storage: where pages go below host memory; None for nowhere.
        quotas: most bytes in host memory of each tenant, of pages that no request holds, ``"*"``
            for those that are not named; None for any number.
    """

    keep: str = _key(one_of(KEEPS), "prompt")
    storage: StorageSettings | None = _key(_below, None)
    quotas: Mapping[str, int] | None = _key(by_tenant, None)

    @classmethod
    def of(cls, setup: KeeperSetup) -> PrefixSettings:
        """Check the parameters, and look the storage up.

        Raises:
            ConfigError: with every reason at once.
        """
        reasons: list[str] = []
        settings = cls(**clean(setup.params, _checks(cls), reasons, "prefixes: "))
        residencies = {group.shape.residency for group in setup.config.groups}
        if settings.quotas and residencies == {"resident"}:
            reasons.append(
                "prefixes: quotas limit nothing where all layers lie on the device; leave them out"
            )
        below = settings.storage
        if below and below.name:
            entry, params, unknown = storage_of(setup.registry, below.name, below.params)
            reasons += [f"prefixes: storage: {reason}" for reason in unknown]
            if entry and below.quotas and not keeps_quotas(entry):
                reasons.append(
                    f"prefixes: storage: quotas must be left out, for {below.name!r} keeps none; "
                    "choose a storage that does, or bound all tenants together by its own "
                    "parameters"
                )
            settings = evolve(settings, storage=evolve(below, params=params))
        if reasons:
            raise ConfigError(CONFIG_REFUSED, reasons)
        return settings


def storage_of(
    registry: PluginRegistry, name: str, given: Mapping[str, Any]
) -> tuple[Any, dict[str, Any], list[str]]:
    """Look a storage up: its entry or None, all its parameters, and every reason against it."""
    reasons: list[str] = []
    plugin = Resolver(registry, reasons, {}).plugin("storage", name)
    names = plugin.entry.parameters if plugin.entry else given
    reasons += [
        f"unknown parameter {shown(each)} of {plugin.who}; {near(each, names)}"
        for each in given
        if each not in names
    ]
    return plugin.entry, {**names, **given}, reasons
