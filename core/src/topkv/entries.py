"""Entries of plugin packages: frozen records that import neither torch nor triton.

Nothing is checked when one is made: the registry judges every field (``topkv.plugins``), so that
one wrong entry leaves the others of its package usable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

HOOK_API = (3, 0)
"""(major, minor) of the hook specs of this core. A plugin of the same major and of a minor that
is not newer loads; every other is refused before its code is imported."""

KINDS = (
    "algorithm",
    "stage",
    "backend",
    "transfer",
    "eviction",
    "topk",
    "engine",
    "observer",
    "keeper",
    "kv_format",
    "host_format",
)
"""Kinds of the core. Packages may bring further ones (``topkv.plugins.kinds``)."""

IMPLS = ("reference", "triton")

SCOPES = ("kv_head", "shared")
"""Who selects: each kv-head for itself, or all of a layer together."""

TIERS = ("cpu", "interpret", "gpu")
"""Places where the conformance kit can run a plugin: its reference on the CPU, its kernels in
Triton's interpreter, its kernels on a CUDA device."""

TRAITS = {
    "attends": "selects anew in every step; a budget that covers the sequence selects all of it",
    "nested": "what a budget selects, a larger one selects too",
    "scale_free": "a query times a positive factor selects the same",
    "exact_update": "token by token gives the representation that a prompt gives, bit for bit",
    "low_ties": "of equal scores the lower unit wins",
    "head_equivariant": "permuted kv-heads select the same, permuted",
    "value_free": "values change no selection",
    "incremental": "what decoding appends is scored by its own keys as soon as it may be selected",
}
"""Promises that an algorithm may make beyond its contract; the kit tests those that it makes."""


@frozen
class Capabilities:
    """Needs and promises of an algorithm or a stage, or limits of a backend. ``None`` means any.

    Attributes:
        units: smallest and largest unit in tokens, both included.
        scopes: of ``SCOPES``.
        attention: of ``"gqa"`` and ``"mla"``.
        kv_formats: names of KV formats that a backend reads (``topkv.hooks.kv_format``).
        host_formats: names of host formats in which a transfer engine keeps entries in host
            memory (``topkv.hooks.host_format``).
        needs_index: the algorithm selects by what the model's own indexer computes.
        tail: ``"forced"``: the core appends the tail unit to every selection and the algorithm
            offers closed units only; ``"selectable"``: the newest token competes (unit 1).
        softcap: the backend caps attention logits where the model does
            (``ModelShape.softcap``).
        options: of attention, by name. Those that a backend has; those that a stage asks of the
            backend of its group, which gets the parameters of the stage under each name
            (``topkv.hooks.backend.BackendSetup``).
        regrains: the stage turns tokens into units: the algorithm and the stages before it select
            single tokens, and its ``refine`` leaves the larger units that hold them.
        dtypes: names of torch dtypes, such as ``"bfloat16"``.
        head_dims: head dims that are supported.
        max_group: largest number of query heads that share one kv-head.
        queries: most queries of a row, of an algorithm, a stage, a backend or a transfer engine,
            which appends as many tokens; its factory may refuse as many for some models.
        capture: every decode method can be captured in a CUDA graph. ``LoweredConfig.capturable``
            says whether that holds for all plugins of a configuration.
        host_memory: the backend can read pages in mapped host memory.
        tiers: of ``TIERS``, where the plugin runs.
        traits: of ``TRAITS``, what an algorithm promises.
    """

    units: tuple[int, int] | None = None
    scopes: tuple[str, ...] | None = None
    attention: tuple[str, ...] = ("gqa",)
    kv_formats: tuple[str, ...] = ("model",)
    host_formats: tuple[str, ...] | None = ("model",)
    needs_index: bool = False
    tail: str = "forced"
    softcap: bool = False
    options: tuple[str, ...] = ()
    regrains: bool = False
    dtypes: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    max_group: int | None = None
    queries: int | None = 1
    capture: bool = True
    host_memory: bool = False
    tiers: tuple[str, ...] = TIERS
    traits: tuple[str, ...] = ()

    @property
    def single_tokens(self) -> bool:
        """True if an algorithm selects single tokens and nothing else.

        A stage that regrains may stand behind it: at unit 1 the open unit is the new token, so
        that it has no need of the ring, which a group of larger units does not show it.
        """
        return self.units == (1, 1)


def _of_each_impl(value: Any) -> Any:
    return dict.fromkeys(IMPLS, value) if isinstance(value, str) else value


@frozen
class NoParameters:
    """Parameters of an entry that has none."""


@frozen
class PluginEntry:
    """One thing that a package offers.

    Attributes:
        name: what users write: letters, digits, ``_``, ``-`` and ``.``. Of two packages that offer
            a name of the same kind, neither gets it.
        kind: one of ``KINDS``, or one that an installed package brings.
        factories: ``"module:attribute"`` by implementation (``IMPLS``), imported only when
            somebody asks for this one; a single text stands for all implementations. Each takes
            one argument, the setup of its kind (``topkv.hooks``).
        hook_api: the (major, minor) of the hook specs that the code was written against. Packages
            state a literal; the default is that of the core which happens to be there.
        capabilities: what coordinator and user can rely on.
        defaults: configuration defaults of the entry, such as ``{"unit": 16}``; they
            stand above topkv's own defaults and below everything else.
        parameters: a frozen attrs class, whose fields are the parameters that ``params`` may set
            (``topkv.parameters``). Setups get one instance of it, checked.
        doctor: ``"module:function"`` of no arguments that returns lines for ``topkv doctor``, one
            for each place where a library is looked for: ``"place: ok, version"`` if it is usable
            there, else ``"place: why not"``.
    """

    name: str
    kind: str
    factories: Mapping[str, str] = field(converter=_of_each_impl)
    hook_api: tuple[int, int] = HOOK_API
    capabilities: Capabilities = Capabilities()
    defaults: Mapping[str, Any] = field(factory=dict)
    parameters: type = NoParameters
    doctor: str | None = None

    @property
    def impls(self) -> tuple[str, ...]:
        """Implementations that there is a factory for."""
        return tuple(impl for impl in IMPLS if impl in self.factories)
