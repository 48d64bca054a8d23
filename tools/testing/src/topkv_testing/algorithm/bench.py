"""One layer of any algorithm, with everything around it poisoned.

The bench does what the core does around the hooks, in plain Python: page table, ring, pools,
step tensors, prompt chunks, settling, rollback, fork, reuse. What no request has written is NaN
(93 in integers), so that a stray read shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor

from topkv.plugins.contract import has_hook
from topkv.types import Selection
from topkv_testing.algorithm.case import Case
from topkv_testing.algorithm.memory import UNWRITTEN, BenchMemory
from topkv_testing.algorithm.options import forced, options_of
from topkv_testing.kit import Subject
from topkv_testing.models.oracle import attention
from topkv_testing.strategies import lengths


class AlgorithmBench(BenchMemory):
    """An algorithm under test and its requests.

    Args:
        subject: plugin and tier.
        case: shape, parameters and data.
        impl: implementation, the tier's if None.
        requests: request slots.
        pages_seed: seed of the page table; another seed gives other host pages.
        prompt_salt: salt of the prompt's queries.
        values: the value of every element of V, and of latent rows; None for values that are
            their keys backwards.
        far: pages at the far end of pools of more than 2**31 elements.
        max_queries: most queries of a row.

    Attributes:
        keys: ``[n, Hkv, D]`` on the CPU: keys of each request as the algorithm is given them,
            by slot; those of the index, of one head, where the model has one.
        pools: the representation pools of the layer.
        algorithm: the instance.
    """

    def __init__(
        self,
        subject: Subject,
        case: Case,
        *,
        impl: str | None = None,
        requests: int = 3,
        pages_seed: int = 0,
        prompt_salt: int = 62,
        values: float | None = 0.5,
        far: bool = False,
        max_queries: int = 1,
    ) -> None:
        sizes = (requests, pages_seed, far, max_queries)
        super().__init__(subject, case, impl or subject.tier.impl, *sizes)
        self.values = values
        self._prompt = case.queries(case.most, prompt_salt)[:, 0]
        self._empty = case.tokens(0)[:0]
        self.keys = dict.fromkeys(range(requests), self._empty)
        self._high = dict.fromkeys(range(requests), 0)
        self._settled = dict.fromkeys(range(requests), -1)

    # What a request goes through.

    def lengths(self, most: int | None = None, least: int = 1) -> st.SearchStrategy[int]:
        """Lengths of a request, by default up to one token below the longest."""
        group = self.group
        return lengths(group.unit, group.page_tokens, most or self.case.most - 1, least)

    def long_lengths(self, most: int | None = None) -> st.SearchStrategy[int]:
        """Lengths with more units than the budget, where the longest request has as many."""
        most = most or self.case.most - 1
        return self.lengths(most, min((self.group.select + 2) * self.group.unit + 1, most))

    def prefill(
        self, slot: int, keys: Tensor, cuts: Sequence[int] = (), settle: bool = True
    ) -> None:
        """Append a prompt in chunks that end after ``cuts`` of its tokens, and settle."""
        edges = sorted({0, len(keys), *(cut for cut in cuts if 0 < cut < len(keys))})
        for start, end in pairwise(edges):
            self._chunk(slot, keys[start:end])
        if settle:
            self._settle(slot)

    def _chunk(self, slot: int, keys: Tensor) -> None:
        start, unit = len(self.keys[slot]), self.group.unit
        self._hold(slot, keys)
        self._set_rows([])
        held, first = self.keys[slot], start - start % unit
        if has_hook(self.algorithm, "retrieve_prompt"):
            first = start
        q, _ = self.case.asked(self._prompt[start : len(held)])
        lse = self._lse(q, held, start)
        chunk, q, lse = (x.to(self.device) for x in (held[first:], q, lse))
        self.algorithm.construct(self.layer, slot, first, chunk, self._values(chunk), q, lse)

    def _values(self, keys: Tensor) -> Tensor:
        """Values ``[n, Hkv, Dv]`` of tokens, NaN where the keys are."""
        if self.values is None:
            return keys.flip(-1)
        values = keys.new_full(
            (len(keys), self.group.num_kv_heads, self.model.out_dim), self.values
        )
        return values.masked_fill(keys.isnan().any(-1).any(-1)[:, None, None], math.nan)

    def _lse(self, q: Tensor, held: Tensor, start: int) -> Tensor:
        """Log-sum-exp of the attention of a chunk's queries."""
        if has_hook(self.algorithm, "retrieve_prompt"):
            return torch.empty(0, len(q))
        seen = torch.arange(len(held)) <= start + torch.arange(len(q))[:, None]
        if self.case.weights is None:
            return attention(q, held, held, self.model.scale, seen)[1].float()
        # Nobody draws the model's own queries; that of queries of zeros, whatever the rows are.
        return seen.sum(1, keepdim=True).log().expand(-1, self.model.num_heads).contiguous()

    def prompt(self, slot: int, keys: Tensor) -> Tensor | None:
        """Append a chunk and select for its rows: ids ``[m, lane_heads, W]`` on the CPU, poisoned
        before.

        None where the core does not ask: no row of the chunk sees more than W units.
        """
        start = len(self.keys[slot])
        self._chunk(slot, keys)
        if start + len(keys) <= self.width * self.group.unit:
            return None
        rows = self._prompt[start : len(self.keys[slot])].to(self.device)
        shape = (len(keys), self.group.lane_heads, self.width)
        ids = torch.full(shape, UNWRITTEN, dtype=torch.int32, device=self.device)
        self.algorithm.retrieve_prompt(self.layer, slot, start, *self.case.asked(rows), ids)
        return ids.cpu()

    @property
    def width(self) -> int:
        """W, the most units that a row of a prompt sees where it selects."""
        forced = self.subject.entry.capabilities.tail == "forced"
        return self.group.select + forced

    def _stored(self, keys: Tensor) -> Tensor:
        """The stored rows of tokens with these keys: the keys, or the rows beside an index."""
        if not self.case.index:
            return keys
        value = 0.5 if self.values is None else self.values
        return keys.new_full((len(keys), self.group.num_kv_heads, self.group.head_dim), value)

    def _hold(self, slot: int, keys: Tensor) -> None:
        """Add tokens to a request and write them to the ring, as far as it reaches."""
        group, start = self.group, len(self.keys[slot])
        self.keys[slot] = held = torch.cat([self.keys[slot], keys])
        self._high[slot] = max(self._high[slot], len(held))
        last = (len(held) - 1) // group.unit
        for unit in range(max(start // group.unit, last - group.ring_slots + 1, 0), last + 1):
            first = unit * group.unit
            done = max(start - first, 0)
            new = self._stored(held[first + done : first + group.unit]).to(self.device)
            where = slice(done, done + len(new))
            new = new.unflatten(1, (group.lane_heads, -1)).permute(1, 2, 0, 3)
            value = new.flip(-1) if self.values is None else self.values
            for ring, written in ((self.layer.ring_k, new), (self.layer.ring_v, value)):
                place = ring[slot, :, unit % group.ring_slots]
                if done == 0:
                    place.fill_(self.case.stale)
                place[:, :, where] = written

    def _settle(self, slot: int) -> None:
        since, length = max(self._settled[slot], 0), len(self.keys[slot])
        first = 0 if self.spec.settle_whole else since - since % self.group.unit
        if has_hook(self.algorithm, "settle"):
            history = list(self._history(slot, first))
            self.algorithm.settle(self.layer, slot, since, length, history)
        self._settled[slot] = length

    def _history(self, slot: int, first: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        for start in range(first, len(self.keys[slot]), self.group.page_tokens):
            keys = self.keys[slot][start : start + self.group.page_tokens]
            k = self._stored(keys).to(self.device)
            yield start, k, self._values(k)

    def stage(self, slots: Sequence[int], keys: Tensor) -> Tensor:
        """The core's part of a decode step in which each row appends: ring and step tensors.

        Args:
            slots: slot of each row, -1 pads.
            keys: ``[B, Hkv, D]``; those of padded rows are replaced by NaN.

        Returns:
            ``k`` for ``update``, on the device.
        """
        keys = keys.clone()
        for row, slot in enumerate(slots):
            if slot < 0:
                keys[row] = math.nan
            else:
                self._hold(slot, keys[row : row + 1])
        self._set_rows(slots, [1] * len(slots))
        return keys.to(self.device)

    def append(self, slots: Sequence[int], keys: Tensor, settle: bool = True) -> None:
        """Decode one token for each row, and settle what is due."""
        self.update(self.stage(slots, keys))
        if settle:
            self.settle_due(slots)

    def update(self, keys: Tensor) -> None:
        """Follow the tokens that the rows append: ``[B, Hkv, D]`` on the device."""
        self.algorithm.update(self.layer, keys[:, None], self._values(keys)[:, None])

    def append_several(self, slots: Sequence[int], keys: Tensor, counts: Sequence[int]) -> None:
        """Decode the first ``counts`` of the tokens ``[B, Q, Hkv, D]`` of each row in one step."""
        keys = keys.clone()
        for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            keys[row, count:] = math.nan
            if slot >= 0:
                self._hold(slot, keys[row, :count])
        self._set_rows(slots, counts)
        keys = keys.to(self.device)
        values = self._values(keys.flatten(0, 1)).unflatten(0, keys.shape[:2])
        self.algorithm.update(self.layer, keys, values)

    def settle_due(self, slots: Sequence[int]) -> None:
        """Settle the requests whose period is over."""
        period = self.spec.settle_period
        for slot in slots:
            if slot >= 0 and period and len(self.keys[slot]) - self._settled[slot] >= period:
                self._settle(slot)

    def extend(self, slot: int, keys: Tensor) -> None:
        """Decode tokens of one request, one after the other."""
        for key in keys:
            self.append([slot], key[None])

    def idle(self, slots: Sequence[int], keys: Tensor) -> None:
        """A step in which no row appends."""
        self._set_rows(slots)
        self.update(keys.to(self.device))

    def _set_rows(self, slots: Sequence[int], appended: Sequence[int] | None = None) -> None:
        held = [len(self.keys[slot]) if slot >= 0 else 0 for slot in slots]
        high = [self._high[slot] if slot >= 0 else 0 for slot in slots]
        new = [flag * (slot >= 0) for flag, slot in zip(appended or [], slots, strict=False)]
        rows = [list(slots), held, high, new or [0] * len(slots), [0] * len(slots)]
        self._ints.fill_(UNWRITTEN)
        self._ints[:, : len(slots)] = torch.tensor(rows, dtype=torch.int32).to(self.device)
        self.layer.step = self._steps(len(slots))

    def retrieve(
        self,
        q: Tensor,
        slots: Sequence[int],
        poison: int = UNWRITTEN,
        appended: Sequence[int] | None = None,
    ) -> Tensor:
        """ids ``[B, lane_heads, K]`` on the CPU, from a tensor that was poisoned."""
        self._set_rows(slots, appended)
        group = self.group
        shape = (len(slots) * group.lane_heads, group.select)
        ids = torch.full(shape, poison, dtype=torch.int32, device=self.device)
        found = self.select(q.to(self.device), ids).ids
        assert found.shape == shape, f"ids {list(found.shape)} where {list(shape)} were asked for"
        return found.cpu().view(len(slots), group.lane_heads, group.select)

    def select(self, q: Tensor, ids: Tensor) -> Selection:
        """``retrieve_topk`` of the rows that are set; ``ids`` is memory for it."""
        q, weights = self.case.asked(q)
        found: Selection = self.algorithm.retrieve_topk(self.layer, q, weights, Selection(ids))
        return found

    def correct(
        self,
        q: Tensor,
        slots: Sequence[int],
        ids: Tensor,
        out: Tensor,
        lse: Tensor,
        appended: Sequence[int] | None = None,
    ) -> None:
        """``correct`` of rows with queries ``[B, Q, H, D]``; ``out`` and ``lse`` in place."""
        self._set_rows(slots, appended)
        self.algorithm.correct(self.layer, q.to(self.device), Selection(ids), out, lse)

    def rollback(self, slot: int, length: int) -> None:
        """Roll the newest tokens back: a change of length, as far as the ring reaches."""
        low = (self._high[slot] - 1) // self.group.unit - self.group.ring_slots + 1
        if (length - 1) // self.group.unit < low:
            raise ValueError(f"rollback to {length} tokens reaches behind unit {low} of the ring")
        self.keys[slot] = self.keys[slot][:length]
        self._settled[slot] = min(self._settled[slot], length)
        if has_hook(self.algorithm, "truncated"):
            self.algorithm.truncated(self.layer, slot, length)

    def end(self, slot: int) -> None:
        """Free a slot: request-grained state is zeroed, pages and ring keep what they hold."""
        self.keys[slot], self._high[slot], self._settled[slot] = self._empty, 0, -1
        for spec in self.spec.representations:
            if spec.grain == "request":
                self.pools[spec.name][slot] = 0

    def fork(self, slot: int, twin: int) -> None:
        """Fork: full pages are shared, the open one and what is keyed by slot are copied."""
        full, rest = divmod(len(self.keys[slot]), self.group.page_tokens)
        self.page_table[twin, :full] = self.page_table[slot, :full]
        if rest:
            self.copy_page(slot, full, twin)
        for spec in self.spec.representations:
            if spec.grain == "request":
                self.pools[spec.name][twin] = self.pools[spec.name][slot]
        for ring in (self.layer.ring_k, self.layer.ring_v):
            ring[twin] = ring[slot]
        self.keys[twin] = self.keys[slot]
        for state in (self._high, self._settled):
            state[twin] = state[slot]

    # What a test looks at.

    def high(self, slot: int) -> int:
        """The largest length that a request has had."""
        return self._high[slot]

    def selectable(self, slot: int) -> int:
        """Units of a request that may be selected."""
        return 0 if slot < 0 else self.selectable_of(len(self.keys[slot]))

    def selectable_of(self, length: int) -> int:
        """Units of a request of N tokens that may be selected."""
        if self.subject.entry.capabilities.tail == "selectable":
            return length
        return max(length - 1, 0) // self.group.unit

    def promised(self, slot: int) -> set[int]:
        """Selectable units that every selection of the request holds."""
        reported = options_of(self.subject).promised or forced
        return reported(len(self.keys[slot]), self)

    def by_key(self) -> dict[str, Tensor]:
        """The pools, with one row for each unit, token or request where the options say how to
        unpack them."""
        order = options_of(self.subject).by_key
        if order is None:
            return dict(self.pools)
        return {name: order(name, pool) for name, pool in self.pools.items()}

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of every pool, see ``by_key``."""
        return {name: pool.cpu().clone() for name, pool in self.by_key().items()}

    def stored(self, slot: int, tokens: int | None = None) -> dict[str, Tensor]:
        """Bytes of the representations of a request's first tokens, by pool, on the CPU; of packed
        pages full ones alone."""
        count = len(self.keys[slot]) if tokens is None else tokens
        pages = self.page_table[slot].long()
        return {
            name: pool[pages].flatten(0, 1)[: self.rows(name, count, full=True)].cpu().contiguous()
            for name, pool in self._pages(self.by_key()).items()
        }

    def rows(self, name: str, count: int, full: bool) -> int:
        """Rows that the first ``count`` tokens of a request have in a pool that is keyed by pages.

        Args:
            full: of pages that are packed, full ones alone, and not all that are written.
        """
        (spec,) = (each for each in self.spec.representations if each.name == name)
        size, page = (1 if spec.grain == "token" else self.group.unit), self.group.page_tokens
        if spec.packed and options_of(self.subject).by_key is None:
            count = count // page * page if full else -(-count // page) * page
        return -(-count // size)


def lanes(ids: Tensor) -> list[list[list[int]]]:
    """The valid ids of each lane of each row, ascending."""
    return [[sorted(i for i in lane if i >= 0) for lane in row] for row in ids.tolist()]
