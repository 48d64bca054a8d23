"""Calls of ``attend`` over latent rows: drawn as a few numbers, checked in float64.

The oracle decodes packed rows itself, from the definition of the format.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from plugins.triton_attention.tests.making import made
from topkv.types import GroupShape, ModelShape, Tables
from topkv_testing.backend.bench import (
    SENTINEL,
    Expected,
    Guarded,
    assert_unchanged,
    expect,
    joined,
    result,
)
from topkv_testing.strategies import INT32, lengths, seeds
from topkv_triton_attention.backend import TritonAttention

CODES, SCALES, ROPES, ROW = 512, 4, 64, 656
NAN_CODES = (0x7F, 0xFF)


def e4m3(code: int) -> float:
    """The number that a byte stands for: 4 bits of exponent, bias 7, and 3 of mantissa; there
    are no infinities, and one NaN of each sign (OCP 8-bit floating point, table 1)."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    size = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


NUMBERS = torch.tensor([e4m3(code) for code in range(256)], dtype=torch.float64)


def unpack(rows: Tensor) -> Tensor:
    """float64 ``[..., 576]`` of packed rows, uint8 ``[..., 656]``."""
    latent = NUMBERS[rows[..., :CODES].long()]
    scale = rows[..., CODES : CODES + 4 * SCALES].contiguous().view(torch.float32).double()
    low, high = rows[..., CODES + 4 * SCALES :].long().unflatten(-1, (-1, 2)).unbind(-1)
    rope = ((high << 8 | low) << 16).to(torch.int32).view(torch.float32).double()
    return torch.cat([latent * scale.repeat_interleave(CODES // SCALES, -1), rope], -1)


def packed(rows: int, generator: torch.Generator) -> Tensor:
    """Random rows uint8 ``[rows, 656]`` with every finite code, and scales far apart."""
    codes = torch.randint(0, 256, (rows, CODES), generator=generator, dtype=torch.uint8)
    for code in NAN_CODES:
        codes[codes == code] = code - 1
    scale = 2.0 ** torch.randint(-10, -5, (rows, SCALES), generator=generator).float()
    rope = torch.randn(rows, ROPES, generator=generator).bfloat16()
    return torch.cat([codes, scale.view(torch.uint8), rope.view(torch.uint8)], -1)


@define(eq=False)
class LatentInputs:
    """Inputs of one call, on the CPU.

    Attributes:
        q: ``[N, Q, H, latent + rope]``.
        pool: ``[slots, layers, unit, row]``; the rows are those of layer 1.
        table, lengths: int32 ``[N, W]`` and ``[N]``.
        listed: float64 rows ``[length, 1, latent + rope]`` of each lane.
        queries: int32 ``[N]`` queries of each row, the others padding; None where Q is 1.
    """

    q: Tensor
    pool: Tensor
    table: Tensor
    lengths: Tensor
    listed: list[Tensor]
    queries: Tensor | None = None

    def expected(self, scale: float, latent: int) -> Expected:
        """The oracle, over explicit rows."""
        counts = torch.ones(len(self.q)) if self.queries is None else self.queries
        parts, nth = [], torch.arange(self.q.shape[1])[:, None]
        for q, rows, count in zip(self.q.nan_to_num(), self.listed, counts, strict=True):
            seen = torch.where(nth < count, len(rows) - (count - 1 - nth), 0)
            mask = torch.arange(len(rows)) < seen
            parts.append(expect(q, rows, rows[..., :latent], scale, mask))
        return joined(parts)

    def attend(self, backend: Any, device: Any, latent: int) -> tuple[Tensor, Tensor]:
        """Call ``attend`` between guards; out ``[N * Q, H, latent]`` and lse ``[N * Q, H]``.

        Rows of q and out are further apart than their heads: 3 heads of NaN, and of ``SENTINEL``.
        """
        pool, heads = self.pool.to(device), self.q.shape[2]
        q = Guarded.of(pad(self.q, (0, 0, 0, 3), value=math.nan), math.nan, device)
        # A lane too many would look like one of length 1.
        table, sizes = Guarded.of(self.table, 0, device), Guarded.of(self.lengths, 1, device)
        shape = (*self.q.shape[:2], heads + 3, latent)
        out = result(shape, self.q.dtype, device)
        out.body[:, :, heads:] = SENTINEL
        lse = result(self.q.shape[:3], torch.float32, device)
        rows = pool[:, 1:2]
        owned = {"q": q.whole, "rows": pool, "table": table.whole, "lengths": sizes.whole}
        tables = Tables(table.body, sizes.body)
        if self.queries is not None:
            counts = Guarded.of(self.queries, 1, device)
            tables.queries, owned["queries"] = counts.body, counts.whole
        assert_unchanged(
            lambda: backend.attend(
                q.body[:, :, :heads],
                *(rows, rows, tables, out.body[:, :, :heads], lse.body),
            ),
            owned,
        )
        out.assert_intact("out")
        lse.assert_intact("lse")
        assert bool((out.body[:, :, heads:] == SENTINEL).all()), "wrote between rows of out"
        return out.body[:, :, :heads].flatten(0, 1).cpu(), lse.body.flatten(0, 1).cpu()


@frozen
class LatentCase:
    """One call in a few numbers.

    Attributes:
        kv_format: ``"model"`` or ``"fp8"``.
        dtype: of the model.
        heads, latent, rope, unit: geometry; ``"fp8"`` fixes 512 and 64.
        lengths: tokens of each lane.
        spare: columns of the table behind the last one that any lane uses.
        size: factor of the rows, for ``"model"``.
        seed: of the tensors.
        queries: of each lane; one each where empty.
        most: queries Q of a row, those beyond ``queries`` being NaN.
    """

    kv_format: str
    dtype: torch.dtype
    heads: int
    latent: int
    rope: int
    unit: int
    lengths: tuple[int, ...]
    spare: int = 0
    size: float = 1.0
    seed: int = field(default=0)
    queries: tuple[int, ...] = ()
    most: int = 1

    @property
    def shapes(self) -> tuple[ModelShape, GroupShape]:
        """Shapes that the backend is made for; the scale is not the usual one, to be noticed."""
        dim = self.latent + self.rope
        model = ModelShape(
            1, self.heads, 1, dim, self.dtype, 0.75 * dim**-0.5, "mla", self.latent
        )  # fmt: skip
        row, dtype = (ROW, torch.uint8) if self.kv_format == "fp8" else (dim, self.dtype)
        group = GroupShape(
            *((0,), self.unit, 1, 1, row, dtype, 128, 8, 2**20, 8, 8, 2),
            planes=1,
        )
        return model, group

    def make(self) -> LatentInputs:
        """Random inputs. What ``lengths`` does not cover is NaN in the rows, trash in table."""
        random = torch.Generator().manual_seed(self.seed)
        used = [-(-length // self.unit) for length in self.lengths]
        slots = sum(used) + 3
        order = torch.randperm(slots, generator=random)[: sum(used)].split(used)
        trash = torch.tensor([-1, *INT32, slots, 0], dtype=torch.int32)
        width = max(1, *used) + self.spare
        table = trash[torch.randint(0, 5, (len(used), width), generator=random)]
        model, group = self.shapes
        pool = torch.empty(slots, 3, self.unit, group.head_dim, dtype=group.dtype)
        pool.view(torch.uint8).fill_(0xFF)  # NaN in every format
        listed = []
        for lane, length in enumerate(self.lengths):
            token = torch.arange(length)
            where = order[lane][token // self.unit]
            table[lane, : used[lane]] = order[lane]
            if self.kv_format == "fp8":
                rows = packed(length, random)
                listed.append(unpack(rows)[:, None])
            else:
                rows = torch.randn(length, model.head_dim, generator=random).mul(self.size)
                rows = rows.to(self.dtype)
                listed.append(rows.double()[:, None])
            pool[where, 1, token % self.unit] = rows
        shape = (len(used), self.most, self.heads, model.head_dim)
        q = 2 * torch.randn(shape, generator=random)
        for lane, count in enumerate(self.queries):
            q[lane, count:] = torch.nan
        sizes = torch.tensor(self.lengths, dtype=torch.int32)
        counts = torch.tensor(self.queries, dtype=torch.int32) if self.queries else None
        return LatentInputs(q.to(self.dtype), pool, table, sizes, listed, counts)

    def backend(self, impl: str, device: Any, max_batch: int | None = None) -> TritonAttention:
        most = max_batch or len(self.lengths)
        return made(*self.shapes, impl, device, most, self.most)

    def check(self, backend: Any, device: Any, inputs: LatentInputs | None = None) -> None:
        """Attend and compare with the oracle."""
        inputs = inputs or self.make()
        expected = inputs.expected(self.shapes[0].scale, self.latent)
        expected.check(*inputs.attend(backend, device, self.latent))


@st.composite
def with_queries(draw: st.DrawFn, cases: st.SearchStrategy[LatentCase]) -> LatentCase:
    """Cases with several queries a row, more than a lane has tokens among them."""
    case, most = draw(cases), draw(st.integers(2, 8))
    lanes = len(case.lengths)
    counts = draw(st.lists(st.integers(1, most), min_size=lanes, max_size=lanes))
    return evolve(case, queries=tuple(counts), most=most)


@st.composite
def latent_cases(draw: st.DrawFn, size: float = 1.0) -> LatentCase:
    """Small models, and packed rows of their one size."""
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
    unit = draw(st.sampled_from((1, 2, 16, 64)))
    heads = draw(st.sampled_from((1, 2, 3, 16, 17, 20)))
    kv_format = draw(st.sampled_from(("model", "model", "fp8")))
    sizes = st.sampled_from(((32, 8), (16, 16), (24, 4), (8, 0), (130, 33)))
    latent, rope = (CODES, ROPES) if kv_format == "fp8" else draw(sizes)
    each = lengths(unit, unit, 2 * unit + 1 if unit > 16 else 100, least=0)
    lanes = tuple(draw(st.lists(each, min_size=1, max_size=3)))
    spare = draw(st.sampled_from((0, 1, 300 // unit + 1)))
    return LatentCase(
        kv_format, dtype, heads, latent, rope, unit, lanes, spare, size, draw(seeds())
    )
