"""PQCache: a key is a few numbers of centroids, and q·k a sum of a table's entries for those.

Zhang, Ji, Chen, Fu, Miao, Nie, Chen, Cui: "PQCache: Product Quantization-based KVCache for Long
Context LLM Inference", SIGMOD 2025, arXiv 2407.12820. The README says what differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import chain

import torch
from torch import Tensor

from topkv import hookimpl
from topkv.hooks.algorithm import AlgorithmSetup, AlgorithmSpec, History, RepresentationSpec
from topkv.types import LayerView
from topkv_authoring.selectors import ScoredUnits, closed_units
from topkv_pqcache import reference
from topkv_pqcache.entry import PQParams
from topkv_pqcache.kmeans import kmeans

BITS = {2: torch.int16, 4: torch.int32}
"""Integers of the size of a key's elements."""


class State(IntEnum):
    """Columns of the pool ``state``.

    Attributes:
        BOOKS: codebooks that the request has.
        CODED: tokens that have codes: the first ones. The others are open.
    """

    BOOKS = 0
    CODED = 1


class PQCache(ScoredUnits):
    """Selects the tokens of the highest mean softmaxed ``q·k``, most of it of quantised keys.

    Each of the m sub-vectors of a key is replaced by the nearest of ``2**bits`` centroids. A
    request has a codebook for each segment of a prompt and each window of decoded tokens, trained
    on it when it is settled. Tokens behind the last one, fewer than two windows, are *open*: they
    are scored by their keys. ``ScoredUnits.combine`` combines the scores of a lane's query heads.

    Pools, all of grain request, because a settle changes codes, and a fork may hold the same
    pages: see the README. P codebooks, C centroids, U tokens, h kv-heads, W places:
        codes uint8 ``[h, U, m]``
        centroids ``[h, P, m, C, d]``
        starts int32 ``[P]``: the first token of each codebook; ascending.
        keys ``[h, W, D]``: those of open tokens, position p at ``p % W``.
        state int32 ``[2]``: see ``State``.
    """

    params: PQParams

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        self.subvectors, self.count = self.params.subvectors, 1 << self.params.bits
        self.segment, self.window = self.params.segment, self.params.window
        # A codebook takes a window of tokens at least. A prompt may leave almost a window open,
        # and decoding adds another one before it settles again.
        self.books = max(1, self.group.max_units // self.window)
        # Of several tokens of a step all but the first may be more than that.
        self.places = min(2 * self.window + self.max_queries - 1, self.group.max_units)

    def refusals(self) -> list[str]:
        dim, parts = self.group.head_dim, self.params.subvectors
        if dim % parts == 0:
            return []
        fit = [m for m in range(1, min(dim, 16) + 1) if dim % m == 0]
        return [f"subvectors must divide the head dim, {dim}, got {parts}; set one of {fit}"]

    def representations(self) -> list[RepresentationSpec]:
        heads, dim = self.group.num_kv_heads, self.group.head_dim
        codes = (heads, self.group.max_units, self.subvectors)
        centroids = (heads, self.books, self.subvectors, self.count, dim // self.subvectors)
        keys = (heads, self.places, dim)
        return [
            RepresentationSpec("codes", "request", codes, torch.uint8),
            RepresentationSpec("centroids", "request", centroids, self.model.dtype),
            RepresentationSpec("starts", "request", (self.books,), torch.int32),
            RepresentationSpec("keys", "request", keys, self.model.dtype),
            RepresentationSpec("state", "request", (len(State),), torch.int32),
        ]

    @hookimpl
    def spec(self) -> AlgorithmSpec:
        return AlgorithmSpec(
            tuple(self.representations()), settle_period=self.window, prefix="none"
        )

    @hookimpl
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        """Do nothing: a prompt gets codebooks when all of its keys are there, see ``settle``."""

    @hookimpl
    def settle(
        self, layer: LayerView, slot: int, since: int, length: int, history: History
    ) -> None:
        """Train codebooks of the open tokens and encode these, once they are a window or more."""
        books, coded = layer.pools["state"][slot].tolist()
        keys = layer.pools["keys"][slot]
        if length - coded < self.window:
            for start, new, _ in history:
                positions = torch.arange(start, start + len(new), device=new.device)
                keys[:, positions % self.places] = new.transpose(0, 1)
            return
        positions = torch.arange(coded, max(since, coded), device=keys.device)
        held = (coded, keys[:, positions % self.places].transpose(0, 1))
        pieces = _pieces(held, history, self._edges(coded, length, books))
        layer.pools["state"][slot, State.BOOKS] = self._close(layer, slot, books, pieces)
        layer.pools["state"][slot, State.CODED] = length

    def _close(
        self, layer: LayerView, slot: int, books: int, pieces: Iterable[tuple[int, Tensor]]
    ) -> int:
        """Encode pieces, each by a codebook of its own, or the last one where places have run out.

        Returns:
            Codebooks of the request now.
        """
        pools = layer.pools
        for start, keys in pieces:
            if books < self.books:
                pools["centroids"][slot, :, books] = self.train(keys)
                pools["starts"][slot, books] = start
                books += 1
            self.encode(layer, slot, books - 1, start, keys)
        return books

    def _edges(self, first: int, length: int, books: int) -> list[int]:
        """First tokens of each new codebook, and the length: equal parts of a segment at most, and
        of half a segment or more unless there is one alone."""
        parts = min(-(-(length - first) // self.segment), max(1, self.books - books))
        return [first + (length - first) * part // parts for part in range(parts + 1)]

    def train(self, keys: Tensor) -> Tensor:
        """A codebook of keys ``[n, h, D]``, in their dtype: ``[h, m, C, d]``."""
        parts = reference.split(keys, self.subvectors).flatten(1, 2).transpose(0, 1)
        how = (self.count, self.params.iterations, self.params.seed)
        found: Tensor = kmeans(parts.contiguous(), *how).unflatten(0, (-1, self.subvectors))
        return found.to(keys.dtype)

    def encode(self, layer: LayerView, slot: int, book: int, start: int, keys: Tensor) -> None:
        """Write the codes of keys ``[n, h, D]`` of positions from ``start`` on."""
        codes = reference.encode(keys, layer.pools["centroids"][slot, :, book])
        layer.pools["codes"][slot, :, start : start + len(keys)] = codes.transpose(0, 1)

    @hookimpl
    def truncated(self, layer: LayerView, slot: int, length: int) -> None:
        """Forget codebooks of which no token is left."""
        starts, state = layer.pools["starts"][slot], layer.pools["state"][slot]
        there = torch.arange(len(starts), device=starts.device) < state[State.BOOKS]
        state[State.BOOKS] = ((starts < length) & there).sum()
        state[State.CODED].clamp_(max=length)

    @hookimpl
    def update(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        step, bits = layer.step, BITS[self.model.dtype.itemsize]
        keys, new = layer.pools["keys"].view(bits), k.contiguous().view(bits)
        nth = torch.arange(k.shape[1], device=k.device)
        positions = (step.lengths.long() - step.appended)[:, None] + nth
        slots = step.slots.long().clamp(min=0)[:, None, None]
        heads = torch.arange(k.shape[2], device=k.device)
        at = (slots, heads, positions.clamp(min=0)[..., None] % self.places)
        # Without a shape that depends on data: differences of bits are added, which are 0 in
        # rows that append nothing, and of padding.
        writes = (step.slots >= 0)[:, None] & (nth < step.appended[:, None])
        change = torch.where(writes[..., None, None], new - keys[at], 0)
        keys.index_put_(at, change, accumulate=True)

    def represent(self, keys: Tensor, valid: Tensor) -> Mapping[str, Tensor]:
        return {}  # nothing is kept by page, see ``settle``

    def score(self, q: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        coded = reference.coded_scores(q, kept["codes"], kept["book"], kept["centroids"])
        place = torch.arange(coded.shape[2], device=q.device) % self.places
        open_ = reference.open_scores(q, kept["keys"])[:, :, place]
        return torch.where(kept["open"][:, None], open_, coded) * self.model.scale

    def lane_scores(self, layer: LayerView, q: Tensor) -> tuple[Tensor, Tensor]:
        step, group = layer.step, self.group
        slots = step.slots.long().clamp(min=0)
        named = ("codes", "centroids", "starts", "keys", "state")
        kept = {name: layer.pools[name][slots] for name in named}
        books, coded = kept["state"].unbind(1)
        closed = closed_units(layer)
        token = torch.arange(group.max_units, device=q.device)
        kept["book"] = reference.book_of(token.expand(len(slots), -1), kept["starts"], books)
        kept["open"] = token >= coded[:, None]
        selectable = token < closed[:, None]
        scores = self.score(q, kept).masked_fill(~selectable[:, None], float("-inf"))
        scores = scores.masked_fill(~self.real_heads(layer, q)[..., None], float("-inf"))
        lanes = self.combine(scores.unflatten(1, (group.lane_heads, -1)))
        forced = (token < self.sink_units) | (token >= closed[:, None] - self.recent_units)
        lanes = lanes.masked_fill(forced[:, None], float("inf"))
        return lanes.flatten(0, 1), closed.repeat_interleave(group.lane_heads)


def _pieces(
    held: tuple[int, Tensor], history: History, edges: Sequence[int]
) -> Iterator[tuple[int, Tensor]]:
    """Keys of ``edges[i] .. edges[i + 1]`` for each i, each with its first position.

    Args:
        held: first position and keys ``[n, h, D]`` of what stands before the history.

    Raises:
        ValueError: there are not all of them, or not in order.
    """
    at, ends, parts = edges[0], list(edges[1:]), list[Tensor]()
    for start, keys in chain([held], ((start, keys) for start, keys, _ in history)):
        if start != at:
            raise ValueError(f"pqcache: expected keys from position {at} on, got some at {start}")
        while ends and at + len(keys) >= ends[0]:
            parts.append(keys[: ends[0] - at])
            keys = keys[len(parts[-1]) :]
            at = ends.pop(0)
            whole = torch.cat(parts)
            yield at - len(whole), whole
            parts = []
        parts.append(keys)
        at += len(keys)
    if ends:
        raise ValueError(f"pqcache: expected keys up to position {ends[-1]}, got {at}")
