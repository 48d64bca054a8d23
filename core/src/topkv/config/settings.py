"""Every setting, once: its name, type, check, default and meaning."""

# ruff: noqa: RUF009 (``setting`` gives a field, not a value that instances share)

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Generic, TypeVar

from attrs import field, fields, frozen

from topkv import checks
from topkv.checks import clean, one_of
from topkv.config import stages
from topkv.config.files import read
from topkv.config.layers import DENSE, overrides
from topkv.config.stages import Named, StageSettings
from topkv.entries import IMPLS, SCOPES
from topkv.errors import ConfigError

Unset = TypeVar("Unset")
"""None in ``SparseConfig``, where a setting may be left out; nothing in ``LoweredConfig``."""

Size = TypeVar("Size")
"""Bytes: an int or a text like ``"64GiB"`` in ``SparseConfig``, an int or None once lowered."""


def setting(check: Callable[[Any], Any], default: Any = None) -> Any:
    """A setting, its meaning in the docstring below it.

    Args:
        check: gives back a value in its lowered form, or raises ValueError.
        default: topkv's own, in lowered form. None where it follows from plugins, the model, the
            device or other settings: the meaning says how, and ``lowering`` does it.
    """
    return field(default=None, metadata={"check": check, "default": default})


# Two bases with slots cannot be combined, hence none here.
@frozen(kw_only=True, slots=False)
class LayerSettings:
    """Settings that can differ from layer to layer; ``layers`` takes them too."""

    algorithm: str | None = setting(checks.plugin)
    """name of a plugin; the only one that is installed by default."""

    scope: str | None = setting(one_of(SCOPES), "kv_head")
    """``"kv_head"`` if each kv-head selects for itself, or ``"shared"``."""

    unit: int | None = setting(checks.count, 16)
    """tokens selected and moved together, a power of two."""

    budget: int | None = setting(checks.count, 2048)
    """attended tokens of a lane: sinks, window and tail included. Where a stage turns tokens into
    units it bounds the selected tokens and the tail unit, not the tokens that come along."""

    buffer: int | None = setting(checks.count)
    """tokens of the LRU buffer of a lane; twice the budget by default. Has to hold a selection;
    where a stage turns tokens into units each token may be in a unit of its own."""

    params: Mapping[str, Any] | None = setting(checks.parameters)
    """parameters of the algorithm."""

    stages: Sequence[str | Mapping[str, Any] | StageSettings] | None = setting(stages.stages, ())
    """stages that refine the selections of the algorithm, in order: names of plugins, or
    mappings with the ``name`` of one and its ``params``. An override replaces the whole list."""

    share: str | None = setting(checks.pattern, "F")
    """which layers select, as a text that repeats over the layers with equal settings: ``"F"`` all
    of them, ``"FSSS"`` the first of four. The others attend to what the layer before them has
    selected, and keep nothing to select by. Layers of a model with an indexer share as it says."""


@frozen(kw_only=True)
class Settings(Generic[Unset, Size]):
    """Settings that hold for all layers."""

    backend: str | Unset = setting(checks.plugin)
    """name of a plugin; the only one that is installed by default."""

    transfer: str | Unset = setting(checks.plugin, "zero_copy")
    """name of a plugin."""

    eviction: str | Unset = setting(checks.plugin, "lru")
    """name of a plugin."""

    topk: str | Unset = setting(checks.plugin, "radix")
    """name of a plugin, for all layers; an algorithm of long rows may state another."""

    observers: Sequence[Any] | Unset = setting(stages.observers, ())
    """plugins that are called at every forward: names, or mappings with the ``name`` of one and
    its ``params``; ``topkv.config.stages.Named`` once lowered."""

    dense_layers: Sequence[int] | Unset = setting(checks.layer_numbers, ())
    """layers that attend to everything."""

    dense_residency: str | Unset = setting(one_of(DENSE), "resident")
    """where dense layers keep their KV: ``"resident"`` or ``"streamed"``."""

    page_tokens: int | Unset = setting(checks.count, 64)
    """tokens of a page, the grain of allocation; ``max_request_tokens`` is rounded up to it."""

    pages: str | Mapping[str, Any] | Named | Unset = setting(stages.pages, "core")
    """who gives out page ids: ``"core"``, or ``"engine"`` where an engine manages blocks of its
    own and hands their ids over (``SparseCoordinator.request_begin``, ``request_add_pages``). A
    plugin that keeps the core's pages when no request holds them, for others to take over, is
    named instead, or given as a mapping with the ``name`` of one and its ``params``."""

    ring_tokens: int | Unset = setting(checks.count)
    """tokens of the ring of a lane: the open unit, and ``max_queries`` tokens behind it."""

    capture: str | Unset = setting(one_of(("off", "auto")), "auto")
    """``"auto"`` where the engine may record decode steps on a GPU and replay them, which its
    plugins have to allow, or ``"off"``."""

    compile: bool | Unset = setting(checks.flag, False)
    """have the engine compile the layers of the decode steps that it captures, which fuses their
    small kernels. Rounding may differ; needs ``capture: auto``."""

    impl: str | Unset = setting(one_of(IMPLS))
    """``"reference"`` or ``"triton"``; by default the first on a CPU, the second on a GPU."""

    max_requests: int | Unset = setting(checks.count, 8)
    """requests at a time."""

    max_queries: int | Unset = setting(checks.count, 1)
    """most tokens that a decode row appends in a step, each with a query of its own: drafted
    tokens and the one before them."""

    verification: str | Unset = setting(one_of(("joint", "exact")), "joint")
    """how the queries of such a row select: ``"joint"``, one selection for all of them, in one
    pass, which plugins have to take; or ``"exact"``, each for itself and in turn, as it would
    without drafts, with any plugin."""

    max_tokens: int | Unset = setting(checks.count, 32768)
    """tokens of all requests together; by default the positions of the model if it states them."""

    max_request_tokens: int | Unset = setting(checks.count)
    """tokens that one request can reach; ``max_tokens`` by default."""

    kv_format: str | Unset = setting(checks.plugin, "model")
    """stored form of keys and values on both tiers: ``"model"`` as the model makes them, or the
    name of a plugin that packs them, such as ``"fp8"`` for latent rows of 656 bytes."""

    host_format: str | Unset = setting(checks.plugin, "model")
    """how sparse layers keep keys and values in host memory: ``"model"`` as the model makes them,
    or the name of a plugin that codes them. The device keeps the model's dtype; each token is
    rounded once, when it comes, so what is attended does not depend on the tier that it was on."""

    host_memory: Size = setting(checks.byte_size)
    """limit, in bytes or as ``"64GiB"``; none by default."""

    device_memory: Size = setting(checks.byte_size)
    """limit, in bytes or as ``"64GiB"``; none by default."""

    resident_fast_path: bool | Unset = setting(checks.flag, True)
    """requests that fit the buffer keep it in order."""

    poison: bool | Unset = setting(checks.flag, False)
    """fill freed memory with NaN."""

    prefill_block_tokens: int | Unset = setting(checks.count, 32768)
    """tokens of history that a prefill streams at a time: a multiple of ``page_tokens``, to which
    the default is rounded, four times this with latent attention. The device holds two of a
    layer, each with a chunk behind it."""

    prefill_buffer_tokens: int | None = setting(checks.size)
    """tokens of one prompt, from its beginning, that stay on the device in all layers while it is
    read in chunks, so that each chunk need not load them; 0 for none. Unset it is none too, unless
    an engine sizes it by the memory that is left. Outputs are the same to the last bit."""


def _metadata(cls: type, key: str) -> dict[str, Any]:
    return {each.name: each.metadata[key] for each in fields(cls)}


@frozen(kw_only=True)
class SparseConfig(Settings[None, int | str | None], LayerSettings):
    """The settings of a user; None means not set. ``lower`` checks them and fills in the rest.

    Each setting is documented in ``topkv.config.settings``.
    """

    layers: Mapping[str | int, str | Mapping[str, Any]] | None = setting(
        overrides(_metadata(LayerSettings, "check"))
    )
    """overrides by layer range: ``{"0-1": "resident", "2-": "quest", "5": {...}}``; a mapping
    takes residency, algorithm, scope, unit, budget, buffer, params, stages and share.
    Where several name a layer, what is written later wins. They beat ``dense_layers``."""

    def as_dict(self) -> dict[str, Any]:
        """The settings that are not None, by name, as the user wrote them."""
        values = {name: getattr(self, name) for name in CHECKS}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def load(cls, source: SparseConfig | Mapping[str, Any] | str | PathLike[str]) -> SparseConfig:
        """A configuration from itself, a mapping of the attributes, or the path of a YAML
        (``.yaml``, ``.yml``) or JSON (``.json``) file.

        Raises:
            ConfigError: it is none of them, or cannot be read; or with every unknown key and every
                wrong value.
        """
        if isinstance(source, cls):
            return source
        head, values = "the configuration is refused", source
        expected = "a SparseConfig, a mapping or the path of a YAML or JSON file"
        if isinstance(source, (str, PathLike)):
            head, expected = f"the configuration {fspath(source)} is refused", "a mapping"
            try:
                values = read(Path(source))
            except (OSError, ValueError) as error:
                raise ConfigError(head, [f"it cannot be read: {str(error)[:500]}"]) from error
            values = {} if values is None else values
        if not isinstance(values, Mapping):
            raise ConfigError(head, [f"it must be {expected}, got {type(values).__name__}"])
        reasons: list[str] = []
        clean(values, CHECKS, reasons)
        if reasons:
            raise ConfigError(head, reasons)
        return cls(**values)


CHECKS: Mapping[str, checks.Check] = _metadata(SparseConfig, "check")
DEFAULTS: Mapping[str, Any] = _metadata(SparseConfig, "default")
"""topkv's own; None where it follows from something else."""

SHARED = tuple(_metadata(Settings, "default"))
"""Names of the settings that hold for all layers, in the order in which they are shown."""
