"""The lifecycle machine over latent rows, with a model's own indexer.

Lives as in ``lifecycle``, of a model with latent attention, whose rows are stored as they
are or packed (``kv_format``). The sparse layers select by the indexer of ``models.indexed``, for
prompts too; the second one has an index of its own or uses the first one's selection. The expected
selections are worked out here, from the index keys that the model beside keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from torch import Tensor

from tests.machines.lifecycle import machine_of, run_lives
from tests.machines.lifecycle_calls import any_live
from tests.machines.lifecycle_tokens import TokenLives
from topkv.types import GroupShape, Index, IndexerShape, ModelShape
from topkv_authoring.latent_fp8 import LATENT, ROPE, ROW_BYTES, decode_fp8, encode_fp8
from topkv_testing.machines.lifecycle_model import (
    HEADS,
    LAYERS,
    SPARSE,
    Forward,
    Given,
    doubles,
)
from topkv_testing.models.cache_model import RequestModel
from topkv_testing.models.indexed import INDEXED

INDEX_HEADS, INDEX_DIM = 2, 4
SIZES = {"model": (12, 8), "fp8": (LATENT + ROPE, LATENT)}
"""Elements of a row, and of its value."""


def best(q: Tensor, weights: Tensor, keys: Tensor, count: int) -> list[int]:
    """Return the tokens of the largest index scores, of equal ones the first, in ascending order.

    Args:
        q: ``[H^I, D^I]``.
        weights: ``[H^I]``.
        keys: ``[n, D^I]``.
        count: how many, at most.
    """
    products = (keys.double() @ q.double().T).clamp(min=0)  # [n, H^I]
    scores = (products * weights.double()).sum(1).tolist()
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    return sorted(order[:count])


class LatentRequest(RequestModel):
    """``k`` holds rows as they are stored, and ``v`` index keys ``[L, n, 1, D^I]``."""

    def __init__(
        self,
        model: ModelShape,
        groups: Mapping[int, GroupShape],
        fast: bool,
        packed: bool,
        selectable: bool,
    ) -> None:
        super().__init__(model, groups, fast, selectable)
        self.v = torch.zeros(LAYERS, 0, 1, INDEX_DIM)
        if packed:
            self.k = torch.zeros(LAYERS, 0, 1, ROW_BYTES, dtype=torch.uint8)

    def planes(self, layer: int) -> Tensor:
        return self.k[layer].unsqueeze(0)


class LatentMachine(TokenLives):
    """Latent rows, and selections by the indexer of each layer.

    Attributes:
        packed: rows are stored as fp8.
        shared: the second sparse layer has no index of its own.
        last: the last index query and weights of the prompts of each (layer, slot).
    """

    few = (60, 3, 8)
    steps: Mapping[str, int] = {"cpu": 15, "interpret": 8, "gpu": 15}
    packed: bool
    shared: bool
    last: dict[tuple[int, int], tuple[Tensor, Tensor]]

    @initialize(
        kv_format=st.sampled_from(["model", "model", "model", "fp8"]),
        unit=st.sampled_from([1, 1, 2, 4]),
        select=st.integers(2, 9),
        spare=st.sampled_from([0, 2, 12]),
        shared=st.booleans(),
        fast=st.booleans(),
        page=st.sampled_from([4, 8]),
        ring=st.integers(2, 4),
        seed=st.integers(0, 9),
    )
    def start(
        self, kv_format: str = "model", unit: int = 1,
        select: int = 4, spare: int = 2, shared: bool = True, fast: bool = True, page: int = 4,
        ring: int = 3, seed: int = 0,
    ) -> None:  # fmt: skip
        """``select`` are tokens. ``spare`` units is what the buffer has beyond one for each;
        a stage turns tokens into larger units, and then the tail is forced."""
        dim, value = SIZES[kv_format]
        indexer = IndexerShape(INDEX_HEADS, INDEX_DIM, (0,) if shared else None)
        self.model = ModelShape(
            *(LAYERS, HEADS, 1, dim, torch.float32, dim**-0.5),
            *("mla", value, indexer),
        )
        self.packed, self.shared, self.last = kv_format == "fp8", shared, {}
        self.registry = self.registry or doubles(INDEXED)
        self.set_up(
            seed,
            fast,
            algorithm="indexed",
            kv_format=kv_format,
            unit=unit,
            stages=[] if unit == 1 else ["to_units"],
            budget=select if unit == 1 else unit + select,
            buffer=(select + spare) * unit,
            page_tokens=page,
            ring_tokens=ring * unit,
            prefill_buffer_tokens=16,
        )
        self.begin_request()

    def new_request(self) -> RequestModel:
        selectable = all(group.unit == 1 for group in self.groups.values())
        return LatentRequest(self.model, self.groups, self.fast, self.packed, selectable)

    def fork_request(self, slot: int) -> int | None:
        twin = super().fork_request(slot)
        if twin is not None:
            for layer in SPARSE:
                if (layer, slot) in self.last:
                    self.last[layer, twin] = self.last[layer, slot]
        return twin

    @precondition(any_live)
    @rule(data=st.data(), tokens=st.integers(1, 17), steps=st.integers(1, 4))
    def sample(self, data: st.DataObject, tokens: int, steps: int) -> None:
        """Fork after a prompt: twins part at once, and both start warm."""
        slot = self.slot(data)
        self.prefill_alone(slot, tokens)
        twin = self.fork_request(slot)
        if twin is None:
            return
        for _ in range(steps):
            self.forward(Forward(rows=[slot, -1, twin]))

    # What goes in.

    def _inputs(self, todo: Forward) -> Given:
        """Draw inputs: NaN where nobody may read; integers in the index, so that many tie."""
        count, nan = todo.count, float("nan")
        q = self.random(LAYERS, count, HEADS, self.model.head_dim)
        rows = self.random(LAYERS, count, 1, self.model.head_dim)
        shapes = ((INDEX_HEADS, INDEX_DIM), (INDEX_DIM,), (INDEX_HEADS,))
        parts = [self.random(LAYERS, count, *shape).mul(2).round() for shape in shapes]
        for row, slot in enumerate(todo.rows):
            for x in (q, rows, *parts):
                if todo.alike:
                    x[:, row] = x[:, 0]
                if slot < 0:
                    x[:, row] = nan
            if row not in todo.appending:
                rows[:, row] = parts[1][:, row] = nan
        own = (0,) if self.shared else range(LAYERS)
        made = {layer: Index(*(x[layer] for x in parts)) for layer in own}
        index = [made.get(layer) for layer in range(LAYERS)]
        kept = encode_fp8(rows) if self.packed else rows
        return Given(q, rows, rows, (kept, parts[1].unsqueeze(2)), index)

    def _attend(self, layer: int, todo: Forward, given: Given) -> Tensor:
        index, end = given.index[layer], len(todo.rows)
        for slot, tokens in todo.chunks:
            end += tokens
            if tokens and index is not None:
                assert index.weights is not None
                self.last[layer, slot] = (index.q[end - 1], index.weights[end - 1])
        return super()._attend(layer, todo, given)

    # What the sparse layers select.

    def _source(self, layer: int) -> int:
        """The layer whose index selects for a layer."""
        return 0 if self.shared else layer

    def _rows_of_ids(self, layer: int, rows: Sequence[list[int]]) -> Tensor:
        """Ids as ``[rows, 1, K]``, -1 behind the last."""
        width = self._width(layer)
        padded = [ids + [-1] * (width - len(ids)) for ids in rows]
        return torch.tensor(padded, dtype=torch.int32).view(len(rows), 1, width)

    def _warm_ids(self, fresh: Sequence[int], todo: Forward) -> dict[int, Tensor]:
        chosen = {}
        for layer in self.groups:
            source, rows = self._source(layer), []
            for slot in fresh:
                keys = self.live[slot].v[source, :, 0]
                asked = self.last.get((source, slot))
                rows.append(best(*asked, keys, self._width(layer)) if asked and len(keys) else [])
            chosen[layer] = self._rows_of_ids(layer, rows)
        return chosen

    def _ids_of(self, todo: Forward, given: Given) -> dict[int, Tensor]:
        chosen = {}
        for layer in self.groups:
            source, rows = self._source(layer), []
            for row, slot in enumerate(todo.rows):
                ids = []
                if slot >= 0:
                    own = slice(row, row + (row in todo.appending))
                    ids = self._best(source, slot, given, row, own, self._width(layer))
                rows.append(ids)
            chosen[layer] = self._rows_of_ids(layer, rows)
        return chosen

    def _best(
        self, source: int, slot: int, given: Given, row: int, own: slice, count: int
    ) -> list[int]:
        """Tokens that a row selects of its request and of the rows ``own`` that it gets."""
        index = given.index[source]
        assert index is not None
        assert index.weights is not None  # of the layer that decides
        keys = torch.cat([self.live[slot].v[source], given.kept[1][source, own]])[:, 0]
        return best(index.q[row], index.weights[row], keys, count)

    def _offer(self, ids: Mapping[int, Tensor]) -> None:
        """Do nothing: the algorithm works its ids out."""

    def _prompt_mask(self, layer: int, slot: int, given: Given, own: slice) -> Tensor:
        if layer not in self.groups:
            return super()._prompt_mask(layer, slot, given, own)
        count = self._width(layer)
        mask = torch.zeros(own.stop - own.start, self.live[slot].length + own.stop - own.start)
        for place, row in enumerate(range(own.start, own.stop)):
            seen = slice(own.start, row + 1)
            mask[place, self._best(self._source(layer), slot, given, row, seen, count)] = 1
        return mask.bool()

    def _attended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        rows = decode_fp8(k, torch.float64) if self.packed else k
        return rows, rows[..., : self.model.out_dim]

    # What must be in place.

    def _check_representations(self, layer: int, request: RequestModel, hosts: Tensor) -> None:
        if layer == self._source(layer):
            tokens = self._token_hosts(layer, hosts)
            keys = self.coordinator.layers[layer].view.pools["index"][tokens].cpu()
            assert torch.equal(keys, request.v[layer, : len(tokens), 0].double()), "index keys"

    def _check_state(self, slot: int, request: RequestModel, layer: int) -> None:
        """Check nothing: the algorithm keeps nothing by slot."""


latent_machine = partial(machine_of, LatentMachine)
"""The machine for a tier; a ``registry`` has to hold ``INDEXED`` too."""

run_latent = partial(run_lives, LatentMachine)
