"""What a user writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from attrs import fields, frozen

from topkv.config.files import read
from topkv.config.values import clean
from topkv.errors import ConfigError


@frozen(kw_only=True)
class SparseConfig:
    """What the user set; None means not set. ``lower`` checks the values and fills in the rest.

    Attributes:
        algorithm, backend, transfer, eviction, topk: names of plugins. An algorithm or backend
            that is not set is the only one that is installed.
        impl: ``"reference"`` or ``"triton"``; by default the first on a CPU, the second on a GPU.
        scope: ``"kv_head"`` if each kv-head selects for itself, or ``"shared"``.
        unit: tokens selected and moved together, a power of two.
        regranulate: where the algorithm selects single tokens, store, move and attend them by the
            ``unit`` that you set, or else by the smallest that the backend takes. Each selected
            token brings its whole unit along, and the open unit is always attended; what this
            adds to the selection is counted (``TransferReport.extra``). False by default. Changes
            nothing where the algorithm takes the unit itself. Selections of several tokens are
            not regranulated: their algorithms recompute the open unit from the ring, and no
            view shows a ring of one unit as one of another.
        budget: attended tokens of a lane: sinks, window and tail included. Where selections are
            regranulated it bounds the selected tokens and the tail unit, not the tokens that
            come along.
        buffer: tokens of the LRU buffer of a lane; twice the budget by default. Has to hold a
            selection; of a regranulated one each token may lie in a unit of its own.
        ring_tokens: tokens of the ring of a lane, at least two units.
        page_tokens: tokens of a page, the grain of allocation.
        max_requests: requests at a time.
        max_tokens: tokens of all requests together.
        max_request_tokens: tokens that one request can reach.
        kv_format: ``"model"`` for keys and values as the model makes them, or ``"fp8"`` for
            latent rows of 656 bytes.
        host_layout: ``"page_head"``, ``"page_first"`` or ``"layer_first"``.
        host_memory, device_memory: limits, in bytes or as ``"64GiB"``.
        dense_layers: layers that attend to everything.
        dense_residency: where they keep their KV: ``"resident"`` or ``"streamed"``.
        layers: overrides by layer range: ``{"0-1": "resident", "2-": "quest", "5": {...}}``; a
            mapping takes residency, algorithm, scope, unit, regranulate, budget, buffer and
            params. Where several name a layer, what is written later wins. They beat
            ``dense_layers``.
        params: parameters of the algorithm.
        resident_fast_path: requests that fit the buffer keep it in order.
        poison: fill freed memory with NaN.
        prefill_block_tokens: tokens of history that a prefill streams at a time.
    """

    algorithm: str | None = None
    backend: str | None = None
    transfer: str | None = None
    eviction: str | None = None
    topk: str | None = None
    impl: str | None = None
    scope: str | None = None
    unit: int | None = None
    regranulate: bool | None = None
    budget: int | None = None
    buffer: int | None = None
    ring_tokens: int | None = None
    page_tokens: int | None = None
    max_requests: int | None = None
    max_tokens: int | None = None
    max_request_tokens: int | None = None
    kv_format: str | None = None
    host_layout: str | None = None
    host_memory: int | str | None = None
    device_memory: int | str | None = None
    dense_layers: Sequence[int] | None = None
    dense_residency: str | None = None
    layers: Mapping[str | int, str | Mapping[str, Any]] | None = None
    params: Mapping[str, Any] | None = None
    resident_fast_path: bool | None = None
    poison: bool | None = None
    prefill_block_tokens: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """What was set, as it was set."""
        values = {field.name: getattr(self, field.name) for field in fields(type(self))}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SparseConfig:
        """A configuration from a mapping of the attributes.

        Raises:
            ConfigError: with every unknown key and every wrong value.
        """
        return cls._from(values, "the configuration is refused")

    @classmethod
    def _from(cls, values: Any, what: str) -> SparseConfig:
        if not isinstance(values, Mapping):
            raise ConfigError(what, [f"it must be a mapping, got {type(values).__name__}"])
        reasons: list[str] = []
        clean(values, reasons)
        if reasons:
            raise ConfigError(what, reasons)
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> SparseConfig:
        """A configuration from a YAML (``.yaml``, ``.yml``) or JSON (``.json``) file.

        Raises:
            ConfigError: the file cannot be read, or holds something wrong.
        """
        what = f"the configuration {fspath(path)} is refused"
        try:
            values = read(Path(path))
        except (OSError, ValueError) as error:
            raise ConfigError(what, [f"it cannot be read: {str(error)[:500]}"]) from error
        return cls._from({} if values is None else values, what)

    @classmethod
    def load(cls, source: SparseConfig | Mapping[str, Any] | str | PathLike[str]) -> SparseConfig:
        """A configuration from itself, a mapping, or the path of a file.

        Raises:
            ConfigError: it is none of them, or holds something wrong.
        """
        if isinstance(source, cls):
            return source
        if isinstance(source, Mapping):
            return cls.from_dict(source)
        if isinstance(source, (str, PathLike)):
            return cls.from_file(source)
        got = type(source).__name__
        expected = "a SparseConfig, a mapping or the path of a YAML or JSON file"
        raise ConfigError("the configuration is refused", [f"it must be {expected}, got {got}"])
