"""Lanes over scattered pages of latent rows, and what attention over them must give."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from topkv.hooks.backend import BackendSetup
from topkv.types import GroupShape, ModelShape
from topkv_testing.oracle import attention
from topkv_testing.tolerance import assert_as_good

PAGE, DIM, LATENT = 64, 576, 512
SCALE = 0.75 * DIM**-0.5
"""Scale other than the library's default, so that one that is not handed on is noticed."""


def shapes(
    heads: int, lanes: int, residency: str = "resident", page: int = PAGE, fp8: bool = False
) -> tuple[ModelShape, GroupShape]:
    """A model, and a group of dense layers of 32768 tokens a request."""
    model = ModelShape(1, heads, 1, DIM, torch.bfloat16, SCALE, "mla", LATENT)
    dim, dtype = (656, torch.uint8) if fp8 else (DIM, torch.bfloat16)
    group = GroupShape(
        *((0,), page, 1, 1, dim, dtype, page, lanes, 32768 // page, 0, 0, 0, residency), planes=1
    )
    return model, group


def setup_of(heads: int, lanes: int, device: str, most: int = 1) -> BackendSetup:
    """Setup that a backend for resident layers is made with, for ``most`` queries a row."""
    sizes = (torch.device(device), lanes, heads)
    return BackendSetup(*shapes(heads, lanes), *sizes, max_queries=most)


@frozen(eq=False)
class PageCase:
    """Inputs of one ``attend``. NaN wherever no lane has a token, page 0 included.

    Attributes:
        q: bfloat16 ``[lanes, Q, heads, 576]``, NaN where a query is padding.
        pool: bfloat16 ``[pages, 1, 64, 576]``.
        table: int32 ``[lanes, width]``, 0 behind the last page of a lane.
        lengths: int32 ``[lanes]``.
        tokens: of each lane, ``[length, 1, 576]``, made before there were pages.
        queries: int32 ``[lanes]``, those that are no padding; None where Q is 1.
    """

    q: Tensor
    pool: Tensor
    table: Tensor
    lengths: Tensor
    tokens: tuple[Tensor, ...]
    queries: Tensor | None = None

    @classmethod
    def make(
        cls,
        heads: int,
        lengths: Sequence[int],
        width: int,
        pages: int,
        seed: int = 0,
        queries: Sequence[int] = (),
        most: int = 1,
    ) -> PageCase:
        """Random tokens in random pages. ``pages`` counts page 0, which is never used."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(torch.bfloat16)

        free = (torch.randperm(pages - 1, generator=generator) + 1).tolist()
        pool = torch.full((pages, 1, PAGE, DIM), torch.nan, dtype=torch.bfloat16)
        table = torch.zeros(len(lengths), width, dtype=torch.int32)
        tokens = []
        for lane, length in enumerate(lengths):
            tokens.append(normal(length, 1, DIM))
            for column, part in enumerate(tokens[-1].split(PAGE) if length else ()):
                table[lane, column] = page = free.pop()
                pool[page, 0, : len(part)] = part[:, 0]
        q = normal(len(lengths), most, heads, DIM)
        for lane, count in enumerate(queries):
            q[lane, count:] = torch.nan
        sizes = torch.tensor(lengths, dtype=torch.int32)
        counts = torch.tensor(queries, dtype=torch.int32) if queries else None
        return cls(q, pool, table, sizes, tuple(tokens), counts)

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, pages, table and lengths."""
        return self.q, self.pool, self.table, self.lengths

    def results(self, device: str) -> tuple[Tensor, Tensor]:
        """Memory for ``out`` and ``lse``, full of NaN."""
        shape = (*self.q.shape[:3], LATENT)
        out = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)
        return out, torch.full(shape[:3], torch.nan, device=device)

    def check(self, out: Tensor, lse: Tensor) -> None:
        """Compare with float64 attention over the tokens of each lane."""
        out, lse = out.cpu(), lse.cpu()
        for lane, tokens in enumerate(self.tokens):
            count = 1 if self.queries is None else int(self.queries[lane])
            for nth in range(self.q.shape[1]):
                rows, what = tokens, f"lane {lane}, query {nth}"
                rows = rows[: max(len(rows) - (count - 1 - nth), 0) if nth < count else 0]
                here = slice(nth, nth + 1)
                mine, norm, q = out[lane, here], lse[lane, here], self.q[lane, here]
                if not len(rows):
                    assert (mine == 0).all(), f"{what} sees nothing, and its output is not 0"
                    assert (norm == -torch.inf).all(), f"{what} sees nothing"
                    continue
                want, log = attention(q, rows, rows[..., :LATENT], SCALE)
                assert_as_good(mine, want, _rough(q, rows), what=what)
                torch.testing.assert_close(norm.double(), log, rtol=1e-4, atol=2e-3)


def _rough(q: Tensor, rows: Tensor) -> Tensor:
    """Attention as it is with bfloat16 weights and values, ``[1, heads, 512]``."""
    rows = rows[:, 0].float()
    weights = (q[0].float() @ rows.T * SCALE).softmax(-1).bfloat16().float()
    out: Tensor = weights @ rows[:, :LATENT]
    return out[None].bfloat16()
