"""Inputs of ``attend``: units that are scattered over a pool whose rest is NaN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from hypothesis import strategies as st
from torch import Tensor

from topkv.types import Tables
from topkv_testing.backend.bench import (
    Expected,
    Guarded,
    assert_unchanged,
    backend_geometries,
    expect,
    joined,
    result,
)
from topkv_testing.kit import Subject
from topkv_testing.strategies import INT32, Geometry, lengths, seeds

Views = tuple[Tensor, Tensor]


@frozen
class Layout:
    """A layout of keys and values in memory; only D is contiguous in all of them.

    Attributes:
        shapes: shapes of the pools for S slots, heads, unit and D.
        views: K and V ``[S, heads, unit, D]`` in those pools.
    """

    shapes: Callable[[int, int, int, int], list[tuple[int, ...]]]
    views: Callable[[Sequence[Tensor], int], Views]


LAYOUTS = {
    "buffer": Layout(  # the device buffer
        lambda s, h, u, d: [(s, h, 2, u, d)],
        lambda pools, d: (pools[0][:, :, 0], pools[0][:, :, 1]),
    ),
    "pages": Layout(  # one of three layers in a page
        lambda s, h, u, d: [(s, 3, h, 2, u, d)],
        lambda pools, d: (pools[0][:, 1, :, 0], pools[0][:, 1, :, 1]),
    ),
    "apart": Layout(  # K and V in pools of their own: heads within tokens, and heads outermost
        lambda s, h, u, d: [(s, u, h, d + 8), (h, s, u, d)],
        lambda pools, d: (pools[0][..., :d].permute(0, 2, 1, 3), pools[1].transpose(0, 1)),
    ),
}


def by_row(q: Tensor, lane_heads: int) -> Tensor:
    """Queries by lane ``[N, Q, heads, D]`` as rows ``[B, Q, H, D]``."""
    rows: Tensor = q.unflatten(0, (-1, lane_heads)).transpose(1, 2).flatten(2, 3)
    return rows


def spaced(q: Tensor, lane_heads: int) -> Tensor:
    """Queries by lane ``[N, Q, heads, D]`` as rows ``[B, Q, H + 3, D]``: 3 heads of NaN behind."""
    rows = by_row(q, lane_heads)
    padded: Tensor = torch.nn.functional.pad(rows, (0, 0, 0, 3), value=float("nan"))
    return padded


def by_lane(rows: Tensor, lane_heads: int) -> Tensor:
    """``[B, Q, H, ...]`` as ``[N * Q, heads, ...]``."""
    lanes: Tensor = rows.unflatten(2, (lane_heads, -1)).transpose(1, 2).flatten(0, 2)
    return lanes


@define(eq=False)
class AttendInputs:
    """Inputs of one call, on the CPU.

    Attributes:
        q: ``[N, Q, heads, D]``.
        pools: memory of K and V.
        layout: key in ``LAYOUTS``.
        table: int32 ``[N, W]``.
        lengths: int32 ``[N]``.
        tokens: for each lane the slot and the place in the unit of each token, ``[length]``.
        lane_heads: lanes of a row.
        queries: int32 ``[B]`` queries of each row, the others padding; None where Q is 1.
    """

    q: Tensor
    pools: list[Tensor]
    layout: str
    table: Tensor
    lengths: Tensor
    tokens: list[Views]
    lane_heads: int = 1
    queries: Tensor | None = None

    def views(self, pools: Sequence[Tensor] | None = None) -> Views:
        """K and V in these pools, or in copies of them elsewhere."""
        pools = self.pools if pools is None else pools
        return LAYOUTS[self.layout].views(pools, self.q.shape[-1])

    def listed(self, lane: int) -> Views:
        """Keys and values ``[length, kv-heads of the lane, D]`` of a lane."""
        where, place = self.tokens[lane]
        k, v = self.views()
        return k[where, :, place], v[where, :, place]

    def expected(self, scale: float) -> Expected:
        """The oracle, over explicit tokens."""
        lanes = range(len(self.tokens))
        if self.queries is None:
            return joined([expect(self.q[n], *self.listed(n), scale) for n in lanes])
        q, parts = self.q.nan_to_num(), []
        for lane in lanes:
            count, length = int(self.queries[lane // self.lane_heads]), int(self.lengths[lane])
            nth = torch.arange(q.shape[1])[:, None]
            seen = torch.where(nth < count, length - (count - 1 - nth), 0)
            mask = torch.arange(length) < seen
            parts.append(expect(q[lane], *self.listed(lane), scale, mask))
        return joined(parts)

    def permuted(self, order: Sequence[int]) -> AttendInputs:
        """These inputs with their lanes in another order."""
        picked = list(order)
        return evolve(
            self,
            q=self.q[picked],
            table=self.table[picked],
            lengths=self.lengths[picked],
            tokens=[self.tokens[lane] for lane in picked],
        )

    def attend(self, backend: Any, device: Any, host: bool = False) -> Views:
        """Call ``attend`` between guards and check that it writes nothing but its results.

        Args:
            backend: the instance.
            device: where it runs.
            host: K and V are in pinned host memory.

        Returns:
            ``out`` ``[N * Q, heads, D]`` and ``lse`` ``[N * Q, heads]`` on the CPU.
        """
        pools = [pool.pin_memory() if host else pool.to(device) for pool in self.pools]
        q = Guarded.of(spaced(self.q, self.lane_heads), float("nan"), device)
        heads = self.lane_heads * self.q.shape[2]
        queries = q.body[:, :, :heads]  # rows are further apart than their heads
        # A lane too many would look like one of length 1.
        table, sizes = Guarded.of(self.table, 0, device), Guarded.of(self.lengths, 1, device)
        out = result(queries.shape, self.q.dtype, device)
        lse = result(queries.shape[:3], torch.float32, device)
        owned = {"q": q.whole, "table": table.whole, "lengths": sizes.whole}
        owned |= {f"memory of k and v, {i}": pool for i, pool in enumerate(pools)}
        tables = Tables(table.body, sizes.body)
        if self.queries is not None:
            counts = Guarded.of(self.queries, 1, device)
            tables.queries, owned["queries"] = counts.body, counts.whole
        views = self.views(pools)
        assert_unchanged(
            lambda: backend.attend(queries, *views, tables, out.body, lse.body), owned
        )
        out.assert_intact("out")
        lse.assert_intact("lse")
        return by_lane(out.body, self.lane_heads).cpu(), by_lane(lse.body, self.lane_heads).cpu()


@frozen
class AttendCase:
    """One call of ``attend`` in a few numbers.

    Attributes:
        geometry: of the group.
        lengths: tokens of each lane, a multiple of ``geometry.lane_heads`` many.
        spare: columns of the table behind the last one that any lane uses.
        layout: key in ``LAYOUTS``.
        keys: factor of the keys.
        seed: of the tensors.
    """

    geometry: Geometry
    lengths: tuple[int, ...]
    spare: int = 0
    layout: str = "buffer"
    keys: float = 1.0
    seed: int = field(default=0)

    @property
    def batch(self) -> int:
        return len(self.lengths) // self.geometry.lane_heads

    def make(self) -> AttendInputs:
        """Random inputs. What ``lengths`` does not cover is NaN in k and v, trash in table."""
        g = self.geometry
        random = torch.Generator().manual_seed(self.seed)
        heads = g.kv_heads // g.lane_heads
        used = [-(-length // g.unit) for length in self.lengths]
        slots = sum(used) + 3
        order = torch.randperm(slots, generator=random)[: sum(used)].split(used)
        trash = torch.tensor([-1, *INT32, slots, 0], dtype=torch.int32)
        width = max(1, *used) + self.spare
        table = trash[torch.randint(0, 5, (len(used), width), generator=random)]
        layout = LAYOUTS[self.layout]
        pools = [
            torch.full(shape, torch.nan, dtype=g.dtype)
            for shape in layout.shapes(slots, heads, g.unit, g.dim)
        ]
        q = 2 * torch.randn(len(used), 1, heads * g.group, g.dim, generator=random)
        sizes = torch.tensor(self.lengths, dtype=torch.int32)
        made = AttendInputs(q.to(g.dtype), pools, self.layout, table, sizes, [], g.lane_heads)
        k, v = made.views()
        for lane, length in enumerate(self.lengths):
            token = torch.arange(length)
            where, place = order[lane][token // g.unit], token % g.unit
            table[lane, : used[lane]] = order[lane]
            shape = (2, length, heads, g.dim)
            keys, values = torch.randn(shape, generator=random)
            k[where, :, place] = (self.keys * keys).to(g.dtype)
            v[where, :, place] = values.to(g.dtype)
            made.tokens.append((where, place))
        return made


def lane_lengths(unit: int, most: int) -> st.SearchStrategy[int]:
    """Tokens of a lane: 0, 1, beside the edge of a unit, or any."""
    return lengths(unit, unit, most, least=0)


@st.composite
def attend_cases(
    draw: st.DrawFn,
    subject: Subject,
    *,
    batch: int | None = None,
    kv_heads: Sequence[int] = (1, 2, 3),
    keys: float = 1.0,
) -> AttendCase:
    """Cases that the entry states; arguments fix what is else drawn."""
    g = draw(backend_geometries(subject, kv_heads))
    rows = batch or draw(st.integers(1, 3))
    most = max(2 * g.unit + 1, 150) if g.kv_heads == 1 else max(g.unit + 1, 70)
    lanes = rows * g.lane_heads
    each = draw(st.lists(lane_lengths(g.unit, most), min_size=lanes, max_size=lanes))
    return AttendCase(
        g,
        tuple(each),
        spare=draw(st.sampled_from((0, 1, 300 // g.unit + 1))),
        layout=draw(st.sampled_from(sorted(LAYOUTS))),
        keys=keys,
        seed=draw(seeds()),
    )
