"""``prefill`` against the oracle, query by query and key by key."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from hypothesis import strategies as st
from torch import Tensor

from topkv.ops.chunk_attention import chunk_attention
from topkv_testing.backend.bench import (
    Expected,
    Guarded,
    assert_unchanged,
    backend_geometries,
    expect,
    make_backend,
    plain_geometries,
    result,
    rounded_sums,
)
from topkv_testing.kit import KitTests, Subject, drawn
from topkv_testing.strategies import Geometry, seeds


@define(eq=False)
class PrefillInputs:
    """q ``[m, H, D]``, and K and V ``[n, Hkv, D]`` as views of a pool that is NaN elsewhere."""

    q: Tensor
    pool: Tensor
    heads_first: bool

    def views(self, pool: Tensor) -> tuple[Tensor, Tensor]:
        """K and V in a copy of the pool."""
        if self.heads_first:  # [Hkv, 2, n + 1, D]
            return pool[:, 0, :-1].transpose(0, 1), pool[:, 1, :-1].transpose(0, 1)
        return pool[:-1, :, 0], pool[:-1, :, 1]  # [n + 1, Hkv, 2, D]


@frozen
class PrefillCase:
    """One call of ``prefill`` in a few numbers.

    Attributes:
        geometry: of the layers; unit and scope mean nothing here.
        rows, keys: m and n.
        q_start, k_start: positions of the first query and key.
        heads_first: the keys of a head stand together; else those of a token.
        model_out: the result goes to a part of a model's rows, in the dtype of the queries; else
            to fp32.
        seed: of the tensors.
    """

    geometry: Geometry
    rows: int
    keys: int
    q_start: int
    k_start: int
    heads_first: bool = False
    model_out: bool = False
    seed: int = field(default=0)

    def make(self) -> PrefillInputs:
        """Random inputs on the CPU."""
        g = self.geometry
        random = torch.Generator().manual_seed(self.seed)
        q = 2 * torch.randn(self.rows, g.kv_heads * g.group, g.dim, generator=random)
        shape = (
            (g.kv_heads, 2, self.keys + 1, g.dim)
            if self.heads_first
            else (self.keys + 1, g.kv_heads, 2, g.dim)
        )
        made = PrefillInputs(
            q.to(g.dtype), torch.full(shape, torch.nan, dtype=g.dtype), self.heads_first
        )
        k, v = made.views(made.pool)
        k.copy_(torch.randn(k.shape, generator=random))
        v.copy_(torch.randn(v.shape, generator=random))
        return made

    def expected(self, inputs: PrefillInputs, scale: float) -> Expected:
        """The oracle: query i sees key j iff ``k_start + j <= q_start + i``."""
        rows = self.q_start + torch.arange(self.rows)
        columns = self.k_start + torch.arange(self.keys)
        mask = columns[None, :] <= rows[:, None]
        return expect(inputs.q, *inputs.views(inputs.pool), scale, mask)

    def run(self, backend: Any, inputs: PrefillInputs, device: Any) -> tuple[Tensor, Tensor]:
        """Call ``prefill`` between guards; results on the CPU."""
        q = Guarded.of(inputs.q, float("nan"), device)
        pool = inputs.pool.to(device)
        heads, several = inputs.q.shape[1], 1 + self.model_out
        dtype = inputs.q.dtype if self.model_out else torch.float32
        out = result((self.rows, several * heads, self.geometry.dim), dtype, device)
        beside, body = out.body[:, :-heads], out.body[:, -heads:]
        lse = result(inputs.q.shape[:2], torch.float32, device)
        assert_unchanged(
            lambda: backend.prefill(
                q.body, *inputs.views(pool), self.q_start, self.k_start, body, lse.body
            ),
            {"q": q.whole, "memory of k and v": pool},
        )
        out.assert_intact("out")
        lse.assert_intact("lse")
        assert bool(beside.isnan().all()), "memory beside out was written"
        return body.cpu(), lse.body.cpu()

    def check(self, subject: Subject) -> None:
        """Run on a fresh instance and compare."""
        backend, model, _ = make_backend(subject, self.geometry, 1)
        inputs = self.make()
        got = self.run(backend, inputs, subject.tier.device)
        self.expected(inputs, model.scale).check(*got, rounded_sums(subject))


@st.composite
def prefill_cases(draw: st.DrawFn, subject: Subject, *, itself: bool = False) -> PrefillCase:
    """Cases that the entry states. ``itself``: a chunk over its own keys."""
    g = draw(backend_geometries(subject, kv_heads=(1, 2)))
    rows = draw(st.one_of(st.sampled_from((1, 2)), st.integers(1, 40)))
    start = draw(st.integers(0, 100))
    keys = rows if itself else draw(st.integers(0, 80))
    ahead = 0 if itself else draw(st.sampled_from((-60, -1, 0, 1, 13, 80)))
    stand = (draw(st.booleans()), draw(st.booleans()))
    return PrefillCase(g, rows, keys, start + 60 + ahead, start + 60, *stand, draw(seeds()))


class PrefillTests(KitTests):
    """``prefill`` of a backend."""

    kind = "backend"

    @drawn(cpu=40, interpret=10, case=partial(prefill_cases, itself=True))
    def test_prefill_of_a_chunk_over_itself_is_causal(
        self, subject: Subject, case: PrefillCase
    ) -> None:
        case.check(subject)

    @drawn(cpu=60, interpret=16, case=prefill_cases)
    def test_prefill_over_history_sees_what_is_before(
        self, subject: Subject, case: PrefillCase
    ) -> None:
        case.check(subject)

    def test_prefill_beyond_one_block(self, subject: Subject) -> None:
        geometry = plain_geometries(subject)[0]
        for rows, keys, q_start, k_start in (
            (130, 130, 5, 5),  # a chunk over itself: whole blocks, and blocks on the edge
            (130, 70, 30, 5),  # history that the first queries see in part
            (3, 270, 500, 0),  # history that all see
            (70, 200, 130, 0),  # a chunk behind its history
        ):
            case = PrefillCase(geometry, rows, keys, q_start, k_start)
            for each in (case, evolve(case, model_out=True)):
                each.check(subject)

    def test_prefill_that_sees_nothing(self, subject: Subject) -> None:
        geometry = plain_geometries(subject)[0]
        for rows, keys, q_start, k_start in ((9, 20, 3, 40), (2, 0, 3, 0), (1, 1, 6, 7)):
            case = PrefillCase(geometry, rows, keys, q_start, k_start)
            backend, _, _ = make_backend(subject, geometry, 1)
            out, lse = case.run(backend, case.make(), subject.tier.device)
            assert bool((lse == -torch.inf).all()), "lse must be -inf where no key is seen"
            assert bool((out == 0).all()), "out must be 0 where no key is seen"
        # A query that sees its own key alone gives that key's value.
        PrefillCase(geometry, 1, 1, 7, 7).check(subject)

    def test_prefill_of_blocks_merges_to_the_whole(self, subject: Subject) -> None:
        """As the core streams history: block by block, joined by a natural log-sum-exp."""
        for geometry in plain_geometries(subject)[:1]:
            whole = PrefillCase(geometry, 9, 40, 31, 0, seed=1)
            inputs = whole.make()
            backend, model, _ = make_backend(subject, geometry, 1)
            device = subject.tier.device
            k, v = (each.to(device) for each in inputs.views(inputs.pool))

            def blocks(k: Tensor = k, v: Tensor = v) -> Iterator[tuple[int, Tensor, Tensor]]:
                for first, last in ((0, 16), (16, 29), (29, 40)):
                    yield first, k[first:last], v[first:last]

            q = inputs.q.to(device)
            out = result(inputs.q.shape, q.dtype, device)
            lse = chunk_attention(backend, q, 31, blocks(), out.body)
            out.assert_intact("out")
            whole.expected(inputs, model.scale).check(out.body, lse, rounded_sums(subject))
