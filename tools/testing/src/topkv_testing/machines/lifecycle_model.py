"""A coordinator and the model beside it, for the lifecycle machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen
from torch import Tensor

from topkv.config import SparseConfig, lower
from topkv.coordinator import SparseCoordinator
from topkv.entries import PluginEntry
from topkv.plugins import PluginRegistry
from topkv.types import GroupShape, Index, ModelShape
from topkv_testing.models.cache_model import PageModel, RequestModel
from topkv_testing.models.doubles import Entries
from topkv_testing.models.host_formats import formats_of
from topkv_testing.tiers import Tier, tier

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 4, 4
MODEL = ModelShape(LAYERS, HEADS, KV_HEADS, DIM, torch.float32, DIM**-0.5)
SPARSE, RESIDENT, STREAMED = (0, 3), 1, 2
REQUESTS, MOST_TOKENS = 4, 48


def doubles(*further: PluginEntry) -> PluginRegistry:
    """Make a registry of the core's own plugins and the doubles, without installed ones."""
    return PluginRegistry([("topkv-doubles", "1", Entries(*further))])


def make_coordinator(
    on: Tier,
    transfer: str = "zero_copy",
    registry: PluginRegistry | None = None,
    model: ModelShape = MODEL,
    **options: Any,
) -> SparseCoordinator:
    """Make a coordinator on doubles: two sparse layers around a resident and a streamed one.

    Args:
        on: where it runs.
        transfer: name of the transfer engine.
        registry: where it is found; ``doubles()`` by default.
        model: its geometry.
        options: of ``SparseConfig``, above those that stand here.
    """
    registry = registry or doubles()
    defaults: dict[str, Any] = {
        "algorithm": "scripted",
        "backend": "gather",
        "transfer": transfer,
        "impl": on.impl,
        "unit": 2,
        "budget": 8,
        "buffer": 10,
        "ring_tokens": 4,
        "page_tokens": 4,
        "max_requests": REQUESTS,
        "max_tokens": 96,
        "max_request_tokens": MOST_TOKENS,
        "layers": {"1": "resident", "2": "streamed"},
        "poison": True,
        "prefill_block_tokens": 8,
    }
    config = SparseConfig(**{**defaults, **options})
    lowered = lower(config, model, device=on.device, registry=registry)
    return SparseCoordinator(lowered, registry)


@frozen
class Forward:
    """Rows of one forward, and where it stops.

    Attributes:
        rows: slots of the decode rows, -1 for padded ones.
        append: tokens that each row appends; by default as many as it has queries.
        chunks: ``(slot, tokens)``.
        widest: ids are drawn below it.
        stop: layers after which it is dropped; None to carry it through.
        ends: slot to end after each of some layers.
        alike: give all rows the same inputs and ids.
        queries: rows of the packed batch that each row has.
    """

    rows: Sequence[int] = ()
    append: Sequence[int] | None = None
    chunks: Sequence[tuple[int, int]] = ()
    widest: int = 8
    stop: int | None = None
    ends: Mapping[int, int] = {}
    alike: bool = False
    queries: int = 1

    @property
    def counts(self) -> list[int]:
        """Tokens that each row appends; 0 of padded ones."""
        asked = self.append or [self.queries] * len(self.rows)
        return [int(n) if slot >= 0 else 0 for slot, n in zip(self.rows, asked, strict=True)]

    @property
    def appending(self) -> list[int]:
        """Indices of the rows that append."""
        return [row for row, count in enumerate(self.counts) if count]

    @property
    def decoded(self) -> int:
        """Rows of the packed batch that are decode rows."""
        return len(self.rows) * self.queries

    @property
    def count(self) -> int:
        return self.decoded + sum(tokens for _, tokens in self.chunks)

    def own(self, row: int) -> slice:
        """The rows of the packed batch whose tokens a row appends."""
        return slice(row * self.queries, row * self.queries + self.counts[row])


@frozen
class Given:
    """Inputs of the rows of a forward, on the CPU, layer by layer.

    Attributes:
        q: ``[L, rows, H, D]``.
        k, v: ``[L, rows, Hkv, D]``.
        kept: ``k`` and ``v`` as ``RequestModel`` keeps them.
        index: the index of each layer, None where it has none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    kept: tuple[Tensor, Tensor]
    index: Sequence[Index | None] = (None,) * LAYERS


class Side:
    """Coordinator and model side by side.

    Attributes:
        on, transfer, registry: what runs.
        model: geometry of the model.
        live: model of the request in each slot.
        ended: models of those that have ended.
        pages: model of the pages.
        follows: the second sparse layer attends to what the first has selected.
    """

    on: Tier = tier("cpu")
    transfer: str = "zero_copy"
    registry: PluginRegistry | None = None
    model: ModelShape = MODEL
    coordinator: SparseCoordinator
    groups: dict[int, GroupShape]
    live: dict[int, RequestModel]
    ended: list[RequestModel]
    pages: PageModel
    fast: bool
    follows: bool = False

    def set_up(self, seed: int, fast: bool, **options: Any) -> None:
        self.coordinator = make_coordinator(
            *(self.on, self.transfer, self.registry, self.model),
            resident_fast_path=fast,
            **options,
        )
        self.groups = {layer: self.coordinator.layers[layer].view.group for layer in SPARSE}
        config = self.coordinator.config
        self.pages = PageModel(config.num_pages - 1, config.page_tokens, config.max_request_tokens)
        self.fast = fast
        self.generator = torch.Generator().manual_seed(seed)
        self.live, self.ended = {}, []
        self.used: set[int] = set()
        self.seen_pages: set[int] = set()

    def offered(self, host_format: str) -> str:
        """Return the host format, or the plain one where the transfer engine states no other."""
        entry = (self.registry or doubles()).get("transfer", self.transfer).entry
        return host_format if entry and host_format in formats_of(entry) else "model"

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def new_request(self) -> RequestModel:
        return RequestModel(self.model, self.groups, self.fast)

    def begin_request(self) -> int:
        slot = self.coordinator.request_begin()
        assert slot not in self.live, "a slot was given away twice"
        self.live[slot] = self.new_request()
        self.pages.held[slot] = []
        self.used.add(slot)
        return slot

    def forget(self, slot: int) -> None:
        self.ended.append(self.live.pop(slot))
        del self.pages.held[slot]

    # State that must not change.

    def snapshot(self) -> list[Any]:
        """Copy the state that a refused call must leave as it was."""
        requests, manager = self.coordinator.requests, self.coordinator.manager
        names = ("active", "length", "high", "resident", "dirty", "fresh", "settled", "prompt")
        state: list[Any] = [getattr(requests, name).copy() for name in names]
        state += [manager.host.references.copy()]
        state += [requests.pages.table.copy(), requests.pages.count.copy()]
        for store in manager.stores:
            maps = (store.unit_slot, store.slot_unit, store.order, store.buffer)
            state += [tensor.clone().cpu().numpy().view(np.uint8) for tensor in maps]
        return state

    def refused(
        self, error: type[Exception], call: Any, *args: Any, match: str | None = None
    ) -> None:
        """Assert that the call raises and changes nothing."""
        before = self.snapshot()
        with pytest.raises(error, match=match):
            call(*args)
        for old, new in zip(before, self.snapshot(), strict=True):
            assert np.array_equal(old, new), f"{call.__name__} was refused and changed state"
