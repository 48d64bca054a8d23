"""The cache as plain Python: what a request holds, where its units are, which pages it owns.

Nothing here is taken from the core but shapes: tokens are CPU tensors that only grow and shrink,
buffers are ``LaneModel`` lists, pages are numbers that are used once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from copy import copy

import torch
from attrs import define, field, frozen
from torch import Tensor

from topkv.types import GroupShape, ModelShape
from topkv_testing.models.oracle import LaneModel


def ceil_div(count: int, size: int) -> int:
    return -(-count // size)


@frozen
class Write:
    """``tokens`` tokens that a forward appends to a request of ``length`` tokens."""

    slot: int
    length: int
    tokens: int


@define
class PageModel:
    """The pages of each request, by numbers of the model that are used once.

    Attributes:
        total: pages that can be leased.
        page_tokens: tokens of a page.
        most: tokens that one request can reach.
        held: numbers of the pages of each slot, in order.
    """

    total: int
    page_tokens: int
    most: int
    held: dict[int, list[int]] = field(factory=dict)
    _numbers: Iterable[int] = field(factory=itertools.count)

    @property
    def free(self) -> int:
        return self.total - len(set(itertools.chain(*self.held.values())))

    def reserve(self, needs: Sequence[tuple[int, int]]) -> bool:
        """Lease pages for each ``(slot, length)``, all or none; False where they run out."""
        return self._try([Write(slot, length, 0) for slot, length in needs], owned=False)

    def write(self, writes: Sequence[Write]) -> bool:
        """Lease pages for all writes, all or none; a page that is written has one owner."""
        return self._try(writes, owned=True)

    def _try(self, writes: Sequence[Write], owned: bool) -> bool:
        before = {slot: list(pages) for slot, pages in self.held.items()}
        for write in writes:
            end = write.length + write.tokens
            pages = self.held[write.slot]
            lacking = ceil_div(end, self.page_tokens) - len(pages)
            pages += itertools.islice(self._numbers, max(0, lacking))
            if end > self.most:
                self.held = before
                return False
        for write in writes if owned else ():
            end = write.length + write.tokens
            pages = self.held[write.slot]
            for index in range(write.length // self.page_tokens, ceil_div(end, self.page_tokens)):
                if self._holders(pages[index]) > 1:
                    pages[index] = next(iter(self._numbers))
        if self.free < 0:
            self.held = before
            return False
        return True

    def _holders(self, number: int) -> int:
        return sum(pages.count(number) for pages in self.held.values())

    def can_fork(self, length: int) -> bool:
        return length % self.page_tokens == 0 or self.free > 0

    def fork(self, slot: int, twin: int, length: int) -> None:
        """Share the full pages and copy the one that is partly filled."""
        pages = self.held[slot][: ceil_div(length, self.page_tokens)]
        if length % self.page_tokens:
            pages[-1] = next(iter(self._numbers))
        self.held[twin] = pages

    def cut(self, slot: int, length: int) -> None:
        del self.held[slot][ceil_div(length, self.page_tokens) :]

    def match(self, pages: Mapping[int, Sequence[int]]) -> None:
        """Assert that each slot holds as many real pages, shared alike, as in the model."""
        real: dict[int, int] = {}
        for slot, numbers in self.held.items():
            assert len(pages[slot]) == len(numbers), f"slot {slot} holds {len(pages[slot])} pages"
            for number, page in zip(numbers, pages[slot], strict=True):
                assert real.setdefault(number, page) == page, f"page {page} should be shared"
        assert len(set(real.values())) == len(real), "requests share a page that they should not"


class RequestModel:
    """The tokens of one request, layer by layer, and the expected state of its lanes.

    Args:
        model: heads and layers.
        groups: the group of each sparse layer.
        fast: a request that fits the buffer holds unit u in slot u.
        selectable: the newest token competes; by default the tail unit is always attended.

    Attributes:
        k, v: ``[L, n, Hkv, D]`` on the CPU.
        high: the largest length that the ring has seen.
        dirty: decode has left an open unit that only the ring holds.
        fresh: prompt tokens have come that no settle has seen.
        prompt: tokens at the last settle.
        turns: how often the request was settled.
        lanes: the buffer of each (layer, lane head).
        counts: hits and misses of each layer; nothing resets them.
    """

    def __init__(
        self,
        model: ModelShape,
        groups: Mapping[int, GroupShape],
        fast: bool,
        selectable: bool = False,
    ) -> None:
        empty = torch.zeros(
            model.num_layers, 0, model.num_kv_heads, model.head_dim, dtype=model.dtype
        )
        self.k, self.v = empty, empty
        self.groups, self.fast, self.selectable = groups, fast, selectable
        self.high = self.prompt = self.turns = 0
        self.dirty, self.fresh = False, True
        self.lanes = {
            (layer, head): LaneModel(group.buffer_slots)
            for layer, group in groups.items()
            for head in range(group.lane_heads)
        }
        self.counts = {layer: [0, 0] for layer in groups}

    @property
    def length(self) -> int:
        return self.k.shape[1]

    def append(self, k: Tensor, v: Tensor) -> None:
        """Append tokens ``[L, m, Hkv, D]``."""
        self.k, self.v = torch.cat([self.k, k], 1), torch.cat([self.v, v], 1)
        self.high = max(self.high, self.length)

    def cut(self, length: int) -> None:
        """Cut to ``length`` tokens; a request that loses a part of its prompt is settled again."""
        self.k, self.v = self.k[:, :length], self.v[:, :length]
        self.fresh |= length < self.prompt

    def settled(self) -> None:
        """Count a settle: a decode step has found prompt tokens that no settle had seen."""
        self.flushed()
        self.turns += 1
        self.fresh, self.prompt = False, self.length

    def twin(self) -> RequestModel:
        """The expected state of a fork of this request."""
        twin = copy(self)
        twin.lanes = {place: LaneModel(lane.capacity) for place, lane in self.lanes.items()}
        twin.counts = {layer: [0, 0] for layer in self.groups}
        twin.dirty = False
        twin.restored()
        return twin

    def ring_low(self, group: GroupShape) -> int:
        """First unit that the ring holds."""
        return max(0, (self.high - 1) // group.unit - group.ring_slots + 1)

    def can_roll_back(self, length: int) -> bool:
        lows = ((self.ring_low(group), group.unit) for group in self.groups.values())
        return all(low == 0 or (length - 1) // unit >= low for low, unit in lows)

    def fits(self, group: GroupShape) -> bool:
        return self.fast and (self.high - 1) // group.unit <= group.buffer_slots

    def claim(self, first: int, end: int) -> None:
        """Note that ``first .. end`` were written: a lane that fits holds their units in place."""
        for (layer, _), lane in self.lanes.items():
            group = self.groups[layer]
            if first < end and self.fits(group):
                for unit in range(first // group.unit, ceil_div(end, group.unit)):
                    if unit < group.buffer_slots:
                        lane.unit_in[unit] = unit

    def flushed(self) -> None:
        """Move the open unit to the host, and to its place in a lane that fits."""
        if self.dirty and self.length:
            self.claim(self.length - 1, self.length)
        self.dirty = False

    def closed(self, tokens: int) -> None:
        """End a decode step of ``tokens`` tokens; the units that it filled moved to the host."""
        self.dirty = True
        for (layer, _), lane in self.lanes.items():
            group = self.groups[layer]
            for unit in range((self.length - tokens) // group.unit, self.length // group.unit):
                if self.fits(group) and unit < group.buffer_slots:
                    lane.unit_in[unit] = unit

    def restored(self) -> None:
        """Forget ring and buffer, and fill them from the host."""
        self.high = self.length
        for lane in self.lanes.values():
            lane.reset()
        self.claim(0, self.length)

    def newest(self, layer: int, length: int, queries: int) -> range:
        """Units of the newest tokens, one for each query: a lane attends to them in any case."""
        unit = self.groups[layer].unit
        return range(max(0, length - queries) // unit, (length - 1) // unit + 1)

    def select(
        self, layer: int, head: int, ids: Sequence[int], length: int, queries: int = 1
    ) -> list[int]:
        """Select: the units that a lane attends at ``length`` tokens; its buffer moves on."""
        group = self.groups[layer]
        limit = length if self.selectable else self.newest(layer, length, queries).start
        if self.fits(group):
            units, missed = [unit for unit in dict.fromkeys(ids) if 0 <= unit < limit], 0
        else:
            units, misses = self.lanes[layer, head].select(ids, limit, self.ring_low(group))
            missed = len(misses)
        self.counts[layer][0] += len(units) - missed
        self.counts[layer][1] += missed
        return units

    def planes(self, layer: int) -> Tensor:
        """All tokens as both tiers store them, ``[planes, n, Hkv, D]``."""
        return torch.stack([self.k[layer], self.v[layer]])

    def entries(self, layer: int, group: GroupShape, units: int) -> Tensor:
        """The first units as ``[units, lane_heads, *entry_shape]``; full units only."""
        tokens = self.planes(layer)[:, : units * group.unit]
        split = tokens.unflatten(1, (units, group.unit))  # [planes, units, unit, Hkv, D]
        heads = (group.lane_heads, group.heads_per_lane)
        entries: Tensor = split.permute(1, 3, 0, 2, 4).unflatten(1, heads)
        return entries
