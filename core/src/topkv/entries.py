"""What a plugin package offers: frozen records that import neither torch nor triton."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import field, frozen, validators

HOOK_API = (2, 0)
"""(major, minor) of the hook specs of this core. A plugin of the same major and of a minor that
is not newer loads; every other is refused before its code is imported."""

KINDS = ("algorithm", "backend", "transfer", "eviction", "topk", "engine", "observer")

IMPLS = ("reference", "triton")

SCOPES = ("kv_head", "shared")
"""Who selects: each kv-head for itself, or all of a layer together."""

TIERS = ("cpu", "interpret", "gpu")
"""Where the conformance kit can run a plugin: its reference on the CPU, its kernels in Triton's
interpreter, its kernels on a CUDA device."""

TRAITS = {
    "attends": "selects anew in every step; a budget that covers the sequence selects all of it",
    "nested": "what a budget selects, a larger one selects too",
    "scale_free": "a query times a positive factor selects the same",
    "exact_update": "token by token gives the representation that a prompt gives, bit for bit",
    "low_ties": "of equal scores the lower unit wins",
    "head_equivariant": "permuted kv-heads select the same, permuted",
    "incremental": "what decoding appends is scored by its own keys as soon as it may be selected",
}
"""What an algorithm may promise beyond its contract; the kit tests what is promised."""

_PLACE = r"[\w.]+:\w+"


def _each_of(known: Iterable[str]) -> Any:
    return validators.deep_iterable(validators.in_(tuple(known)))


@frozen
class Capabilities:
    """What an algorithm needs and offers, or what a backend can take. ``None`` means any.

    Attributes:
        units: smallest and largest unit in tokens, both included.
        scopes: of ``SCOPES``.
        attention: of ``"gqa"`` and ``"mla"``.
        kv_formats: of ``"model"`` and ``"fp8"``, row formats that a backend reads.
        needs_index: the algorithm selects by what the model's own indexer computes.
        tail: ``"forced"``: the core appends the tail unit to every selection and the algorithm
            offers closed units only; ``"selectable"``: the newest token competes (unit 1).
        softcap: the backend caps attention logits where the model does
            (``ModelShape.softcap``).
        dtypes: names of torch dtypes, such as ``"bfloat16"``.
        head_dims: head dims that are supported.
        max_group: largest number of query heads that share one kv-head.
        lse: the backend returns the log-sum-exp.
        capture: every decode method can be captured in a CUDA graph. ``LoweredConfig.capturable``
            says whether that holds for all plugins of a configuration.
        host_memory: the backend can read pages that lie in mapped host memory.
        tiers: of ``TIERS``, where the plugin runs.
        traits: of ``TRAITS``, what an algorithm promises.
    """

    units: tuple[int, int] | None = None
    scopes: tuple[str, ...] | None = None
    attention: tuple[str, ...] = ("gqa",)
    kv_formats: tuple[str, ...] = ("model",)
    needs_index: bool = False
    tail: str = field(default="forced", validator=validators.in_(("forced", "selectable")))
    softcap: bool = False
    dtypes: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    max_group: int | None = None
    lse: bool = True
    capture: bool = True
    host_memory: bool = False
    tiers: tuple[str, ...] = field(default=TIERS, validator=_each_of(TIERS))
    traits: tuple[str, ...] = field(default=(), validator=_each_of(TRAITS))

    @property
    def single_tokens(self) -> bool:
        """Whether an algorithm selects single tokens and nothing else.

        Its selections can be regranulated: at unit 1 the open unit is the new token, so that it
        has no need of the ring, which a group of larger units does not show it.
        """
        return self.units == (1, 1) or self.needs_index


def _of_each_impl(value: Any) -> Any:
    return dict.fromkeys(IMPLS, value) if isinstance(value, str) else value


def _are_factories(entry: Any, attribute: Any, value: Any) -> None:
    is_mapping = isinstance(value, Mapping) and len(value) > 0
    if not is_mapping or not all(
        impl in IMPLS and isinstance(place, str) and re.fullmatch(_PLACE, place)
        for impl, place in value.items()
    ):
        known = " or ".join(map(repr, IMPLS))
        raise ValueError(
            f"factories must be 'module:attribute', or map {known} to that, got {value!r}"
        )


@frozen
class PluginEntry:
    """One thing that a package offers.

    Attributes:
        name: what users write: letters, digits, ``_``, ``-`` and ``.``. Of two packages that offer
            a name of the same kind, neither gets it.
        kind: one of ``KINDS``.
        factories: ``"module:attribute"`` by implementation (``IMPLS``), imported only when
            somebody asks for this one; a single text stands for all implementations. Each takes
            one argument, the setup of its kind (``topkv.hooks``).
        hook_api: the (major, minor) of the hook specs that the code was written against. Packages
            state a literal; the default is that of the core which happens to be there.
        capabilities: what coordinator and user can rely on.
        defaults: configuration defaults of the entry, such as ``{"unit": 16}``; they
            stand above topkv's own defaults and below everything else.
        parameters: names and default values of the parameters that ``params`` may set.
        doctor: ``"module:function"`` of no arguments that returns lines for ``topkv doctor``, one
            for each place where a library is looked for: ``"place: ok, version"`` if it is usable
            there, else ``"place: why not"``.
    """

    name: str
    kind: str = field(validator=validators.in_(KINDS))
    factories: Mapping[str, str] = field(converter=_of_each_impl, validator=_are_factories)
    hook_api: tuple[int, int] = HOOK_API
    capabilities: Capabilities = Capabilities()
    defaults: Mapping[str, Any] = field(factory=dict)
    parameters: Mapping[str, Any] = field(factory=dict)
    doctor: str | None = field(
        default=None, validator=validators.optional(validators.matches_re(_PLACE))
    )

    @property
    def impls(self) -> tuple[str, ...]:
        """Implementations that there is a factory for."""
        return tuple(impl for impl in IMPLS if impl in self.factories)
