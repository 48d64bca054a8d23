"""``prefill`` over latent rows, and ``prefill_selected`` over rows of both kinds."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from attrs import field, frozen
from hypothesis import given
from hypothesis import strategies as st

from plugins.triton_attention.tests.making import made
from topkv.ops.chunk_attention import Chosen, chunk_attention
from topkv.types import GroupShape, ModelShape
from topkv_testing.backend.bench import Guarded, assert_unchanged, columns_of, expect, result
from topkv_testing.kit import examples
from topkv_testing.strategies import seeds
from topkv_testing.tiers import CUDA, Tier, tier
from topkv_triton_attention import reference

TIERS = [tier("cpu"), tier("gpu" if CUDA else "interpret")]
if CUDA:
    TIERS.append(Tier("gpu", "reference", torch.device("cuda"), None))
every_tier = pytest.mark.parametrize("where", TIERS, ids=str)


@frozen
class Case:
    """One call in a few numbers.

    Attributes:
        dtype: of the model.
        heads, kv_heads, dim, value_dim: geometry; latent where the dims differ.
        rows, keys: m and n.
        q_start, k_start: positions of the first query and key.
        share: of the keys that a query keeps; None calls ``prefill``.
        seed: of the tensors.
    """

    dtype: torch.dtype
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    rows: int
    keys: int
    q_start: int
    k_start: int
    share: float | None = None
    seed: int = field(default=0)

    @property
    def latent(self):
        return self.value_dim != self.dim

    def backend(self, where):
        kind = {"attention": "mla", "value_dim": self.value_dim} if self.latent else {}
        model = ModelShape(
            *(1, self.heads, self.kv_heads, self.dim, self.dtype, 0.75 * self.dim**-0.5), **kind
        )
        group = GroupShape(
            *((0,), 1, 1, self.kv_heads, self.dim, self.dtype, 128, 8, 2**20, 8, 8, 2),
            planes=2 - self.latent,
        )
        return made(model, group, where.impl, where.device, 1), model.scale

    def make(self):
        """q, the memory of k and v with NaN behind the keys, and keep."""
        random = torch.Generator().manual_seed(self.seed)
        q = 2 * torch.randn(self.rows, self.heads, self.dim, generator=random)
        shape = (self.keys + 1, self.kv_heads, 2 - self.latent, self.dim)
        pool = torch.randn(shape, generator=random).to(self.dtype)
        pool[-1] = math.nan
        share = 1.0 if self.share is None else self.share
        keep = torch.rand(self.rows, self.keys, generator=random) < share
        return q.to(self.dtype), pool, keep

    def views(self, pool):
        k, v = pool[:-1, :, 0], pool[:-1, :, -1]
        return k, v[..., : self.value_dim]

    def expected(self, q, pool, keep, scale):
        i, j = self.q_start + torch.arange(self.rows), self.k_start + torch.arange(self.keys)
        return expect(q, *self.views(pool), scale, keep & (j <= i[:, None]))

    def check(self, where):
        backend, scale = self.backend(where)
        q, pool, keep = self.make()
        expected = self.expected(q, pool, keep, scale)
        queries, memory = Guarded.of(q, math.nan, where.device), pool.to(where.device)
        ids = Guarded.of(columns_of(keep), 7, where.device)
        out = result((self.rows, self.heads, self.value_dim), torch.float32, where.device)
        lse = result((self.rows, self.heads), torch.float32, where.device)
        inputs = (queries.body, *self.views(memory), self.q_start, self.k_start)
        owned = {"q": queries.whole, "memory of k and v": memory, "ids": ids.whole}
        assert_unchanged(
            lambda: (
                backend.prefill(*inputs, out.body, lse.body)
                if self.share is None
                else backend.prefill_selected(*inputs, ids.body, out.body, lse.body)
            ),
            owned,
        )
        out.assert_intact("out")
        lse.assert_intact("lse")
        expected.check(out.body.cpu(), lse.body.cpu())


SIZES = (
    *((3, 1, 40, 32), (2, 1, 32, 16), (20, 1, 28, 24), (2, 1, 163, 130)),  # latent
    *((2, 1, 64, 64), (4, 2, 96, 96)),
)


@st.composite
def cases(draw, shares=(None, 0.0, 0.1, 0.6, 1.0)):
    size = draw(st.sampled_from(SIZES))
    share = draw(st.sampled_from(shares))
    rows = draw(st.one_of(st.sampled_from((1, 2)), st.integers(1, 40)))
    keys, start = draw(st.integers(0, 80)), draw(st.integers(60, 160))
    ahead = draw(st.sampled_from((-60, -1, 0, 1, 13, 80)))
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
    return Case(dtype, *size, rows, keys, start + ahead, start, share, draw(seeds()))


@every_tier
def test_a_query_sees_what_it_may(where):
    @examples(where, cpu=100, interpret=50)
    @given(cases())
    def check(case):
        case.check(where)

    check()


@every_tier
@pytest.mark.parametrize("share", [None, 0.05])
@pytest.mark.parametrize("size", [(3, 1, 40, 32), (2, 1, 64, 64)])
def test_beyond_one_block(where, share, size):
    for rows, keys, q_start, k_start in (
        (130, 130, 5, 5),  # a chunk over itself: whole blocks, and blocks on the edge
        (130, 70, 30, 5),  # history that the first queries see in part
        (3, 270, 500, 0),  # history that all see
        (9, 20, 3, 40),  # nothing to see
        (0, 5, 3, 0),
    ):
        if rows:
            Case(torch.float32, *size, rows, keys, q_start, k_start, share).check(where)
            continue
        backend, _ = Case(torch.float32, *size, 1, keys, q_start, k_start).backend(where)
        q = torch.empty(0, size[0], size[2], device=where.device)
        k = torch.zeros(keys, size[1], size[2], device=where.device)
        lse = torch.empty(0, size[0], device=where.device)
        backend.prefill(q, k, k[..., : size[3]], q_start, k_start, q[..., : size[3]], lse)


@every_tier
@pytest.mark.parametrize("share", [None, 0.3])
def test_the_sizes_of_deepseek(where, share):
    Case(torch.bfloat16, 4, 1, 576, 512, 21, 70, 60, 5, share).check(where)


@every_tier
def test_only_what_is_kept_has_influence(where):
    """Values that no query keeps may be as large as they like."""
    case = Case(torch.float32, 3, 1, 40, 32, 20, 50, 60, 0, 0.3)
    backend, scale = case.backend(where)
    q, pool, keep = case.make()
    keep[:, 10:30] = False
    expected = case.expected(q, pool, keep, scale)
    pool[10:30] = 1e30
    out = torch.full((20, 3, 32), math.nan, device=where.device)
    lse = torch.full((20, 3), math.nan, device=where.device)
    views = case.views(pool.to(where.device))
    ids = columns_of(keep).to(where.device)
    backend.prefill_selected(q.to(where.device), *views, 60, 0, ids, out, lse)
    expected.check(out.cpu(), lse.cpu())


@every_tier
@pytest.mark.parametrize("size", [(3, 1, 40, 32), (2, 1, 64, 64)])
@pytest.mark.parametrize("cuts", [(0, 40), (0, 16, 40)])
def test_selected_history_in_blocks_merges_to_the_whole(where, size, cuts):
    """Blocks are as the core streams history of a chunk whose rows have selected their tokens; the
    result is in rows of more elements."""
    case = Case(torch.float32, *size, 9, 40, 31, 0, 1.0)
    backend, scale = case.backend(where)
    q, pool, _ = case.make()
    random = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(32 + row, generator=random)[:12] for row in range(9)])
    ids = ids.sort(1).values.int()
    ids[4, 7:] = -1
    keep = torch.zeros(9, 40, dtype=torch.bool)
    for row in range(9):
        keep[row, ids[row][ids[row] >= 0].long()] = True
    k, v = (each.to(where.device) for each in case.views(pool))
    blocks = ((first, k[first:last], v[first:last]) for first, last in pairwise(cuts))
    wide = torch.full((9, case.heads * case.value_dim + 8), math.nan, device=where.device)
    out = wide[:, :-8].unflatten(1, (case.heads, case.value_dim))
    chosen = Chosen(ids.to(where.device)[:, None], 1)
    lse = chunk_attention(backend, q.to(where.device), 31, blocks, out, chosen)
    case.expected(q, pool, keep, scale).check(out.cpu(), lse.cpu())


@pytest.mark.parametrize("budget", [1, 500])
def test_reference_in_pieces(monkeypatch, budget):
    monkeypatch.setattr(reference, "BUDGET", budget)
    Case(torch.float32, 3, 1, 40, 32, 21, 33, 12, 4, 0.4).check(tier("cpu"))
