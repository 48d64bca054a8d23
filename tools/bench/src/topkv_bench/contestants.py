"""Contestants of the bench: Transformers' caches on the GPU and offloaded, and topkv."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from topkv import SparseCoordinator, attach
from topkv.config import SparseConfig, lower
from topkv.errors import CapabilityError
from topkv.plugins import registry
from topkv.report import TransferReport
from topkv_bench.drift import drifting
from topkv_bench.fill import fill_coordinator, fill_dynamic, fill_layer
from topkv_transformers.cache import TopkvCache
from topkv_transformers.examine import window_bytes
from topkv_transformers.support import advice_of, refusals, shape_of

NAMES = ("dense", "offloaded", "topkv-resident", "topkv", "topkv-compiled")
"""Names of contestants: Transformers' dynamic cache on the device, this cache offloaded to the
host, topkv with all layers resident, topkv as it was configured, and with its steps captured and
compiled."""

ROOM = ("max_requests", "max_tokens", "max_request_tokens")
"""Settings that follow from contexts and requests."""


@attrs.frozen
class Cell:
    """One measurement.

    Attributes:
        contestant: one of ``NAMES``.
        context: tokens of each prompt.
        requests: rows of the batch.
        new_tokens: tokens that each row generates.
        pool: True if caches are filled without prompts.
        drift: drift of topkv's selections, or a trace; None for the algorithm's own.
        config: configuration of topkv, without ``ROOM``.
        queries: tokens of each row that a step verifies; None for one in ``generate``.
        accepts: shares of drafts that are accepted, measured one after the other.
    """

    contestant: str
    context: int
    requests: int
    new_tokens: int
    pool: bool
    drift: float | str | None
    config: SparseConfig
    queries: int | None = None
    accepts: tuple[float, ...] = ()

    @property
    def row(self) -> dict[str, Any]:
        """Fields of a row that are known before it is measured."""
        place = {"context": self.context, "requests": self.requests}
        if self.queries is not None:
            place["queries"] = self.queries
        return {"contestant": self.contestant, **place, "status": "ok"}

    @property
    def verified(self) -> int:
        """Tokens of a row that a step verifies, or makes."""
        return self.queries or 1

    @property
    def columns(self) -> int:
        """Tokens that ``generate`` is given; one more than the context behind a filled cache, but
        for the bench's own loop, which brings tokens itself."""
        return self.context + int(self.pool and self.queries is None)

    @property
    def tokens(self) -> int:
        """Tokens that a request reaches."""
        return self.columns + self.new_tokens

    @property
    def sparse_config(self) -> SparseConfig:
        """Configuration that topkv is attached with."""
        room: dict[str, Any] = {
            "max_requests": self.requests,
            "max_tokens": self.requests * self.tokens,
            "max_request_tokens": self.tokens,
        }
        if self.queries is not None and "max_queries" not in self.config.as_dict():
            room["max_queries"] = self.queries
        if self.contestant == "topkv-resident":
            room |= {"layers": {"0-": "resident"}, "dense_layers": None}
        if self.contestant == "topkv-compiled":
            room |= {"capture": "auto", "compile": True}
        return attrs.evolve(self.config, **room)


def _refuse_to_verify(queries: int, reason: str) -> None:
    what = f"a step that verifies {queries} tokens of a row cannot be measured"
    raise CapabilityError(what, [f"{reason}; give --queries 1"])


FORGETS = "layers that slide over a window or keep a state forget what rejected tokens replaced"


class Dynamic:
    """Stock ``generate``: keys and values in a ``DynamicCache``, on the device or offloaded.

    As ``Topkv`` it is ready to decode in one way until ``close``.

    Args:
        model: the model, not attached.
        cell: the cell to measure.
    """

    def __init__(self, model: PreTrainedModel, cell: Cell) -> None:
        self.model, self.cell = model, cell
        self.offloading = cell.contestant == "offloaded"
        if self.offloading and cell.verified > 1:
            reason = "the offloaded cache of Transformers is measured with one token a step alone"
            _refuse_to_verify(cell.verified, reason)
        if self.offloading and model.device.type != "cuda":
            raise CapabilityError(
                "there is nothing to offload from",
                [f"the offloaded cache of Transformers needs a GPU, got {model.device}"],
            )

    def cache(self, filled: bool) -> DynamicCache:
        """Make a new cache, empty or with the context of every request."""
        cache = DynamicCache(config=self.model.config, offloading=self.offloading)
        if self.cell.verified > 1 and not all(map(_crops, cache.layers)):
            _refuse_to_verify(self.cell.verified, FORGETS)
        if filled:
            fill_dynamic(cache, self.model, self.cell.requests, self.cell.context)
        return cache

    @contextmanager
    def verifying(self, cache: DynamicCache) -> Iterator[None]:
        """Have forwards over a filled cache verify the tokens that they append."""
        yield

    def advance(self, tokens: int) -> None:
        """Do nothing: nothing drifts."""

    def held(self, cache: DynamicCache) -> dict[str, int]:
        """Return bytes by tier; ``device`` and ``host`` are the sums that are compared."""
        tensors = [each for layer in cache.layers for each in (layer.keys, layer.values)]
        everywhere = sum(tensor.nbytes for tensor in tensors)
        here = self.model.device.type
        device = sum(tensor.nbytes for tensor in tensors if tensor.device.type == here)
        return {"cache": device, "device": device, "host": everywhere - device}

    def moved(self, cache: DynamicCache) -> TransferReport | None:
        """Return the loads since the cache began; None if nobody counts them."""
        return None

    def facts(self) -> dict[str, Any]:
        """Return all that results depend on, beside the cell."""
        return {}

    def close(self) -> None:
        """Do nothing: the model was not changed."""


def _crops(layer: Any) -> bool:
    """Return True for a layer that forgets nothing."""
    return isinstance(layer, DynamicLayer) and not isinstance(layer, DynamicSlidingWindowLayer)


class Topkv:
    """The attached model, whose selections drift if the cell says so. Arguments as ``Dynamic``."""

    def __init__(self, model: PreTrainedModel, cell: Cell) -> None:
        self.model, self.cell = model, cell
        self._stack, self._drift = ExitStack(), None
        self._walked: Tensor | None = None
        config, queries = cell.sparse_config, cell.verified
        try:
            self.handle = self._stack.enter_context(attach(model, config, engine="transformers"))
            if queries > 1 and any(self.handle.requests.stand_in.stock):
                _refuse_to_verify(queries, FORGETS)
            if queries > 1:  # lengths do not grow by what is rejected
                place = {"dtype": torch.int32, "device": self.coordinator.config.device}
                self._walked = torch.full((cell.requests,), cell.context, **place)
            if cell.drift is not None:
                entered = drifting(
                    self.coordinator, cell.drift, cell.context, queries, self._walked
                )
                self._drift = self._stack.enter_context(entered)
        except BaseException:
            self._stack.close()
            raise

    @property
    def coordinator(self) -> SparseCoordinator:
        """Coordinator of the attached model."""
        coordinator: SparseCoordinator = self.handle.coordinator
        return coordinator

    def cache(self, filled: bool) -> TopkvCache:
        cache: TopkvCache = self.handle.new_cache()
        if filled:
            self.handle.requests.begin(cache.state, self.cell.requests)
            for slot in cache.slots:
                fill_coordinator(self.coordinator, slot, self.cell.context)
            for layer in cache.state.stock:
                fill_layer(layer, layer.update, self.model, len(cache.slots), self.cell.context)
            cache.state.seen = self.cell.context
        return cache

    @contextmanager
    def verifying(self, cache: TopkvCache) -> Iterator[None]:
        """Have forwards over a filled cache verify the tokens that they append, as those are in
        which ``generate`` verifies drafts."""
        requests, state = self.handle.requests, cache.state
        requests.reserve(state, [self.cell.tokens - state.seen] * len(state.slots))
        with requests.exclusive(), requests.watch.unchanged():
            state.most = self.cell.verified
            try:
                yield
            finally:
                state.most = 1

    def advance(self, tokens: int) -> None:
        """Let selections drift by as many tokens more, or a step of a trace, where lengths do not
        say that."""
        if self._walked is not None:
            self._walked += 1 if isinstance(self.cell.drift, str) else tokens

    def held(self, cache: TopkvCache) -> dict[str, int]:
        report = self.handle.memory()
        return attrs.asdict(report) | {"device": report.device}

    def moved(self, cache: TopkvCache) -> TransferReport:
        return self.coordinator.transfers_of(cache.slots)

    def facts(self) -> dict[str, Any]:
        settings = {each.name: each.value for each in self.handle.config.settings}
        facts: dict[str, Any] = {"settings": settings}
        if self._drift is not None and self._drift.layers:
            facts["drift"] = attrs.asdict(self._drift)
        if hasattr(self.handle, "capture"):
            facts["capture"] = str(self.handle.capture)
        return facts

    def close(self) -> None:
        self._stack.close()


Contestant = Dynamic | Topkv


def enter(model: PreTrainedModel, cell: Cell) -> Contestant:
    """Make a contestant ready.

    Raises:
        TopkvError: the cell is refused, or there is no room for it.
    """
    transformers = cell.contestant in ("dense", "offloaded")
    return Dynamic(model, cell) if transformers else Topkv(model, cell)


@attrs.frozen
class Expected:
    """Bytes of caches that a cell will hold on the device and in host memory."""

    device: int = 0
    host: int = 0


def expected(model: PreTrainedModel, cell: Cell, device: torch.device) -> Expected | None:
    """Return the bytes that a cell will hold, before anything is taken; None if unknown.

    The offloaded cache holds two layers on the device, the current one and the next.

    Args:
        model: may be on the device ``meta``, without weights.
        cell: the cell to measure.
        device: where the model is to run.

    Raises:
        ConfigError, PluginError: topkv's configuration is wrong.
    """
    if refusals(model, on_meta=model.device.type == "meta"):
        return None  # then the bytes of its layers are not known either
    shape, windows = shape_of(model), cell.requests * window_bytes(model, cell.tokens)
    if cell.contestant.startswith("topkv"):
        lowered = lower(
            cell.sparse_config,
            shape,
            device=device,
            registry=registry(),
            checkpoint=advice_of(model, registry()),
            max_positions=getattr(model.config, "max_position_embeddings", None),
        )
        needed = SparseCoordinator.required_bytes(lowered)
        return Expected(needed.device + windows, needed.host)
    if shape.attention != "gqa":
        return None
    row = 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
    layer, layers = row * cell.requests * cell.tokens, shape.num_layers
    if cell.contestant == "offloaded":
        return Expected(min(2, layers) * layer + windows, layers * layer)
    return Expected(layers * layer + windows)


def clear(device: torch.device) -> None:
    """Give back the memory that a contestant has left, and count peaks anew."""
    gc.collect()  # hooks and handles refer to each other
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
