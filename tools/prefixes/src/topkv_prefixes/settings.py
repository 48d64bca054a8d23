"""Parameters of ``prefixes``: pages that are kept, their storage below host memory, quotas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from topkv import checks
from topkv.checks import need, one_of
from topkv.config.stages import Named
from topkv.entries import PluginEntry
from topkv.messages import shown
from topkv.parameters import passes, values

if TYPE_CHECKING:
    from topkv.config import LoweredConfig
    from topkv.config.sources import Resolver

KEEPS = ("prompt", "all")
WRITES = ("write_through", "write_through_selective", "write_back")
ANYBODY = "*"
"""Name that stands for all tenants without a quota of their own."""

FETCHES = ("timeout", "wait_complete", "best_effort")


def is_text(value: Any) -> bool:
    """True for a text that UTF-8 has, which can be part of a key or a path."""
    try:
        return isinstance(value, str) and bool(value.encode() or True)
    except UnicodeEncodeError:
        return False


def seconds(value: Any) -> float:
    right = type(value) in (int, float) and 0 <= value <= 86400
    need(right, "be a number of seconds, at most a day", value)
    return float(value)


def limit(value: Any) -> float:
    """Check the time limit of a call: with 0 seconds every call would count as hung."""
    right = type(value) in (int, float) and 0 < value <= 86400
    need(right, "be a number of seconds above 0, at most a day", value)
    return float(value)


def by_tenant(value: Any) -> dict[str, int] | None:
    """Bytes by tenant of quotas, if there are any; raises ValueError with every reason."""
    if value is None:
        return None
    need(bool(value), "be a mapping of tenants such as {'acme': '4GiB', '*': '1GiB'}", value)
    good, reasons = {}, []
    for name, size in value.items():
        try:
            need(is_text(name), "be a name that UTF-8 has", name)
            good[name] = checks.byte_size(size)
        except ValueError as error:
            reasons.append(f"{shown(name)} {error}")
    if reasons:
        raise ValueError(f"must be sizes by tenant: {'; '.join(reasons)}")
    return good


def keeps_quotas(entry: PluginEntry) -> bool:
    """Return True if the storage of an entry keeps each owner within its quota."""
    return bool(getattr(entry, "quotas", False))  # of ``topkv_prefixes.entry.StorageEntry``


def _quotas() -> Any:
    return field(default=None, converter=by_tenant, validator=passes(by_tenant))


@frozen(kw_only=True, repr=False)
class StorageSettings(Named):
    """The parameter ``storage``.

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
        queue: bytes of copies that may wait to be stored, or a text such as ``"4GiB"``; what is
            beyond is not stored.
        quotas: most bytes of each tenant in it, ``"*"`` for those that are not named; None for any
            number. The plugin has to keep quotas.
    """

    name: str = ""
    # Wrong ones, here and as ``storage``, are not shown: there may be a password among them.
    params: Mapping[str, Any] | None = field(default=None, repr=repr)
    write: str = field(default="write_through", validator=passes(one_of(WRITES)))
    fetch: str = field(default="timeout", validator=passes(one_of(FETCHES)))
    wait_s: float = field(default=1.0, validator=passes(seconds))
    wait_s_per_1k: float = field(default=0.25, validator=passes(seconds))
    least_tokens: int = field(default=256, validator=passes(checks.count))
    limit_s: float = field(default=30.0, validator=passes(limit))
    queue: int | str = field(default=4 << 30, validator=passes(checks.byte_size))
    quotas: Mapping[str, int] | None = _quotas()

    def __repr__(self) -> str:
        """The plugin with its parameters, and what differs from the defaults."""
        usual = values(StorageSettings(name=self.name, params=self.params))
        found = [f"{name}={each!r}" for name, each in values(self).items() if each != usual[name]]
        return " ".join([super().__repr__(), *found])


@frozen(kw_only=True)
class PrefixSettings:
    """The parameters of ``prefixes``.

    Attributes:
        keep: which pages of earlier requests with the same first tokens a prompt takes over: with
            ``"prompt"`` those of prompts, which attended to everything; with ``"all"`` those of
            generated tokens too. What is published is the caller's to decide by it.
        storage: where pages go below host memory; None for nowhere.
        quotas: most bytes in host memory of each tenant, of pages that no request holds, ``"*"``
            for those that are not named; None for any number.
    """

    keep: str = field(default="prompt", validator=passes(one_of(KEEPS)))
    storage: StorageSettings | None = field(default=None, repr=repr)
    quotas: Mapping[str, int] | None = _quotas()

    def settled(self, known: Resolver, config: LoweredConfig) -> PrefixSettings:
        """The settings with the parameters of the storage, see ``topkv.hooks.keeper``."""
        if self.quotas and all(group.shape.residency == "resident" for group in config.groups):
            known.reasons.append(
                "quotas of prefixes limit nothing where all layers lie on the device; leave them "
                "out (pages)"
            )
        below = self.storage
        if below is None:
            return self
        if not below.name:
            known.reasons.append(
                "storage of prefixes must have a name, that of a plugin of kind storage (pages)"
            )
            return self
        plugin, below = known.named("storage", below, "(pages)")
        if plugin.entry and below.quotas and not keeps_quotas(plugin.entry):
            known.reasons.append(
                f"storage of prefixes: quotas must be left out, for {plugin.who} keeps none; "
                "choose a storage that does, or bound all tenants together by its own parameters "
                "(pages)"
            )
        return evolve(self, storage=below)
