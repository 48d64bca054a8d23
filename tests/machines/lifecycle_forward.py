"""Forwards that run on the coordinator and on the model, and are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from topkv.errors import HostMemoryError
from topkv.types import Index
from topkv_fp8_host_format.rows import rounded
from topkv_testing.machines.lifecycle_model import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    SPARSE,
    Forward,
    Given,
    Side,
)
from topkv_testing.models.cache_model import Write
from topkv_testing.models.oracle import attention


class Forwards(Side):
    """``forward`` runs one forward on both sides, coordinator and model."""

    def forward(self, todo: Forward) -> list[Tensor] | None:
        """Run one forward, compare all that it computes, and move the model on.

        Returns:
            The output ``[rows, H, D]`` of each layer; None if the pages did not suffice.
        """
        slots = [slot for slot in todo.rows if slot >= 0]
        fresh = [slot for slot in slots if self.live[slot].fresh]
        warm = self._warm_ids(fresh, todo)
        if not self._begin(todo, warm):
            return None
        for slot in fresh:
            self.live[slot].settled()
        for layer in SPARSE:
            for row, slot in enumerate(fresh):
                self._select(layer, row, slot, warm, self.live[slot].length)
        for slot, _ in todo.chunks:
            self.live[slot].flushed()
        for row, count in enumerate(todo.counts):
            if count:
                request = self.live[todo.rows[row]]
                request.high = max(request.high, request.length + count)
        return self._run(todo)

    def _begin(self, todo: Forward, warm: dict[int, Tensor]) -> bool:
        writes = [
            *(
                Write(slot, self.live[slot].length, count)
                for slot, count in zip(todo.rows, todo.counts, strict=True)
                if count
            ),
            *(Write(slot, self.live[slot].length, tokens) for slot, tokens in todo.chunks),
        ]
        call = (list(todo.rows), list(todo.chunks), todo.append, todo.queries)
        if not self.pages.write(writes):
            self.refused(HostMemoryError, self.coordinator.forward_begin, *call)
            return False
        self._offer(warm)
        self.coordinator.forward_begin(*call)
        self.seen_pages |= set(self.coordinator.requests.pages.table.flatten().tolist()) - {0}
        return True

    def _run(self, todo: Forward) -> list[Tensor]:
        given = self._inputs(todo)
        ids = self._ids_of(todo, given)
        if self._turns(todo) > 1:
            turns = [ids, *(self._ids_of(todo, given) for _ in range(1, todo.queries))]
            ids = {layer: torch.stack([turn[layer] for turn in turns]) for layer in ids}
        self._offer(ids)
        layers = LAYERS if todo.stop is None else todo.stop
        outs = []
        for layer in range(layers):
            outs.append(self._attend(layer, todo, given))
            if layer in todo.ends:
                self.coordinator.request_end(todo.ends[layer])
        self._offer({})
        for slot in todo.ends.values():
            assert self.coordinator.requests.active[slot], "a request ended during a forward"
            assert len(self.coordinator.requests.pages.of(slot)) == len(self.pages.held[slot])
        if todo.stop is None:
            self.coordinator.forward_end()
        else:
            self.coordinator.forward_abort()
        results = [out.cpu() for out in outs]
        self._compare(todo, results, given, ids)
        self._advance(todo, *given.kept)
        for slot in todo.ends.values():
            self.forget(slot)
        return results

    def _attend(self, layer: int, todo: Forward, given: Given) -> Tensor:
        shape = (given.q.shape[1], HEADS, self.model.out_dim)
        out = torch.full(shape, float("nan"), device=self.on.device)
        q, k, v = (x[layer].to(self.on.device) for x in (given.q, given.k, given.v))
        index = given.index[layer]
        if index is not None:
            assert index.weights is not None
            index = Index(*(x.to(self.on.device) for x in (index.q, index.k, index.weights)))
        self.coordinator.attention(layer, q, k, v, index, out)
        return out

    def _inputs(self, todo: Forward) -> Given:
        """Draw inputs; rows that nobody may read hold NaN."""
        q = self.random(LAYERS, todo.count, HEADS, DIM)
        k, v = (self.random(LAYERS, todo.count, KV_HEADS, DIM) for _ in range(2))
        for row, count in enumerate(todo.counts):
            rows = slice(row * todo.queries, (row + 1) * todo.queries)
            asking = max(count, 1) if todo.rows[row] >= 0 else 0
            for each, kept_rows in ((q, asking), (k, count), (v, count)):
                if todo.alike:
                    each[:, rows] = each[:, : todo.queries]
                each[:, rows.start + kept_rows : rows.stop] = float("nan")
        kept = (k.clone(), v.clone())
        for layer, group in self.groups.items():
            if group.coded_bytes:
                for rows in kept:
                    rows[layer] = rounded(rows[layer])
        return Given(q, k, v, kept)

    def _warm_ids(self, fresh: Sequence[int], todo: Forward) -> dict[int, Tensor]:
        """Ids that each sparse layer selects for the requests whose buffers are warmed."""
        return self._ids(fresh, todo.widest)

    def _ids_of(self, todo: Forward, given: Given) -> dict[int, Tensor]:
        """Ids that each sparse layer selects for the decode rows."""
        return self._ids(todo.rows, todo.widest, todo.alike)

    def _ids(self, rows: Sequence[int], widest: int, alike: bool = False) -> dict[int, Tensor]:
        """Draw ids for each sparse layer: any at all, ``[rows, lane heads, K]``."""
        chosen = {}
        for layer, group in self.groups.items():
            shape = (len(rows), group.lane_heads, group.select)
            ids = torch.randint(-2, widest, shape, generator=self.generator)
            wild = torch.rand(shape, generator=self.generator) < 0.02
            ids[wild] = 2**31 - 1
            chosen[layer] = (ids[:1].expand(shape) if alike and len(rows) else ids).int()
        if self.follows:
            chosen[SPARSE[1]] = chosen[SPARSE[0]]
        return chosen

    def _offer(self, ids: Mapping[int, Tensor]) -> None:
        for layer in SPARSE:
            given = {}
            if layer in ids:
                chosen = ids[layer].flatten(-3, -2).to(self.on.device)
                given[layer] = list(chosen) if chosen.dim() == 3 else chosen
            algorithm = self.coordinator.layers[layer].algorithm
            offered = getattr(algorithm, "algorithm", algorithm).next_ids  # behind stages
            offered.pop(layer, None)
            offered.update(given)

    def _turns(self, todo: Forward) -> int:
        """How often each layer selects in a forward: once, or for each query of a row."""
        exact = self.coordinator.config.verification == "exact"
        return todo.queries if exact else 1

    def _masks(
        self, todo: Forward, layer: int, row: int, slot: int, ids: dict[int, Tensor]
    ) -> Tensor:
        """Mask of what the queries of a row attend, bool ``[1 or queries, H, length]``."""
        length, asking = self._length(todo, row), max(todo.counts[row], 1)
        if self._turns(todo) == 1 or layer not in self.groups:
            return self._select(layer, row, slot, ids, length, asking)
        mask = torch.zeros(asking, HEADS, length, dtype=torch.bool)
        for query in range(asking):
            own = {layer: ids[layer][query]}
            end = length - (asking - 1 - query)
            mask[query, :, :end] = self._select(layer, row, slot, own, end)[0]
        return mask

    def _select(
        self,
        layer: int,
        row: int,
        slot: int,
        ids: dict[int, Tensor],
        length: int,
        queries: int = 1,
    ) -> Tensor:
        """Mask of what each query head attends, bool ``[1, H, length]``; the lanes move on.

        Args:
            length: tokens of the request, those that the row appends included.
            queries: how many the row has.
        """
        if layer not in self.groups:
            return torch.ones(1, HEADS, length, dtype=torch.bool)
        mask = torch.zeros(1, HEADS, length, dtype=torch.bool)
        group = self.groups[layer]
        heads = HEADS // group.lane_heads
        for head in range(group.lane_heads):
            chosen = self._units(layer, ids[layer][row, head].tolist())
            units = self.live[slot].select(layer, head, chosen, length, queries)
            newest = self.live[slot].newest(layer, length, queries)
            tail = [] if self.live[slot].selectable else newest
            for unit in [*units, *tail]:
                tokens = slice(unit * group.unit, (unit + 1) * group.unit)
                mask[0, head * heads : (head + 1) * heads, tokens] = True
        return mask

    def _units(self, layer: int, ids: list[int]) -> list[int]:
        """Units that a selection stands for, in the order in which the core takes them."""
        return ids

    def _compare(
        self, todo: Forward, outs: list[Tensor], given: Given, ids: dict[int, Tensor]
    ) -> None:
        """Compare with attention in float64 over the tokens that are attended by the model."""
        for layer, out in enumerate(outs):
            for row, slot in enumerate(todo.rows):
                own, end = todo.own(row), (row + 1) * todo.queries
                asking = 0 if slot < 0 else max(todo.counts[row], 1)
                assert (out[own.start + asking : end] == 0).all(), "a padded row must be 0"
                if slot < 0:
                    continue
                length = self._length(todo, row)
                mask = self._masks(todo, layer, row, slot, ids)
                own_place = torch.arange(length - asking, length)[:, None, None]
                mask = mask & (torch.arange(length) <= own_place)
                rows = slice(own.start, own.start + asking)
                self._close_to_truth(layer, slot, out, given, rows, own, mask)
            first = todo.decoded
            for slot, tokens in todo.chunks:
                own = slice(first, first + tokens)
                start, first = self.live[slot].length, first + tokens
                places = torch.arange(start + tokens)
                mask = places[None] <= start + torch.arange(tokens)[:, None]
                mask &= self._prompt_mask(layer, slot, given, own)
                self._close_to_truth(layer, slot, out, given, own, own, mask)

        for layer in self.groups:  # sharing layers were planned with it, called or not
            if self._source(layer) < len(outs) <= layer and self._turns(todo) == 1:
                for row, slot in enumerate(todo.rows):
                    if slot >= 0:
                        self._masks(todo, layer, row, slot, ids)

    def _source(self, layer: int) -> int:
        """The layer that selects for a sparse layer."""
        return SPARSE[0] if self.follows and layer in self.groups else layer

    def _length(self, todo: Forward, row: int) -> int:
        """Tokens of a decode row's request, the new ones included."""
        return self.live[todo.rows[row]].length + todo.counts[row]

    def _prompt_mask(self, layer: int, slot: int, given: Given, own: slice) -> Tensor:
        """Mask of what the rows ``own`` of a prompt select, broadcast to ``[rows, tokens]``."""
        return torch.ones(1, 1, dtype=torch.bool)

    def _close_to_truth(
        self, layer: int, slot: int, out: Tensor, given: Given, rows: slice, own: slice,
        mask: Tensor,
    ) -> None:  # fmt: skip
        """Compare ``rows``, which attend to their request and to the rows ``own`` that it gets."""
        request, kept = self.live[slot], given.kept
        both = (
            torch.cat([x[layer], y[layer, own]])
            for x, y in zip((request.k, request.v), kept, strict=True)
        )
        keys, values = self._attended(*both)
        expected, _ = attention(given.q[layer, rows], keys, values, self.model.scale, mask)
        torch.testing.assert_close(out[rows].double(), expected, rtol=1e-4, atol=1e-5)

    def _attended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[n, Hkv, D]`` of stored rows."""
        return k, v

    def _advance(self, todo: Forward, k: Tensor, v: Tensor) -> None:
        if todo.stop is not None:
            rows = [slot for slot in todo.rows if slot >= 0]
            for slot in [*rows, *(slot for slot, _ in todo.chunks)]:
                self.live[slot].flushed()
                self.live[slot].restored()
            return
        for row in todo.appending:
            request = self.live[todo.rows[row]]
            request.append(k[:, todo.own(row)], v[:, todo.own(row)])
            request.closed(todo.counts[row])
        first = todo.decoded
        for slot, tokens in todo.chunks:
            request, start = self.live[slot], self.live[slot].length
            request.append(k[:, first : first + tokens], v[:, first : first + tokens])
            request.claim(start, request.length)
            request.fresh |= tokens > 0
            first += tokens
