"""One algorithm in one shape, and the keys, queries and weights for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from topkv_testing.strategies import KEYS, Geometry


def _positive(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return KEYS["normal"](shape, generator).abs()


def _zero(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.zeros(tuple(shape))


WEIGHTS: dict[str, Callable[[Sequence[int], torch.Generator], Tensor]] = {
    "normal": KEYS["normal"],
    "positive": _positive,
    "zero": _zero,
    "ties": KEYS["ties"],
}
"""Ways to make the weights, float32 ``[rows, 1, H^I]``, of an indexer's heads."""


_MIXED = ("normal", "heavy")
"""Kinds of keys into which zeros and ties are mixed."""


@frozen
class Case:
    """One algorithm in one shape, and the data for it.

    Of a model with an indexer, the geometry is that of what the algorithm is given: one key of
    ``dim`` elements a token, which all kv-heads share, ``group`` queries for each kv-head, and a
    weight for each of them if the index has weights.

    Exact data are on a coarse grid: multiples of 1/4 up to 8, which every 16-bit dtype holds,
    and whose products fp32 sums without rounding in any order. So equal scores are equal bits
    however an implementation blocks its sums, and selections can be compared as they are.

    Attributes:
        geometry: shape of keys and queries.
        params: parameters that differ from the entry's.
        select: K.
        ring: T.
        keys: name in ``strategies.KEYS``.
        seed: of all tensors.
        least_units: units of the longest request, before they are rounded up to whole pages.
        stale: what the ring holds where no token of the open unit is. NaN shows most stray
            reads; a large number shows those of kernels whose minimum and maximum drop NaN.
        exact: data on the grid.
        weights: name in ``WEIGHTS``; None for an index without weights, and without an indexer.
        index: of a model with an indexer.
    """

    geometry: Geometry
    params: Mapping[str, Any]
    select: int
    ring: int
    keys: str
    seed: int
    least_units: int
    stale: float
    exact: bool = True
    weights: str | None = None
    index: bool = False

    @property
    def key_heads(self) -> int:
        """Heads of the keys that an algorithm is given."""
        return 1 if self.index else self.geometry.kv_heads

    @property
    def units(self) -> int:
        """Units of the longest request: whole pages."""
        page = self.geometry.page_units
        return -(-self.least_units // page) * page

    @property
    def most(self) -> int:
        """Tokens of the longest request."""
        return self.units * self.geometry.unit

    def generator(self, salt: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 64 + salt)

    def _finish(self, x: Tensor) -> Tensor:
        return self._on_grid(x).to(self.geometry.dtype)

    def _on_grid(self, x: Tensor) -> Tensor:
        return (x * 4).round().clamp(-32, 32) / 4 if self.exact else x

    def tokens(self, salt: int) -> Tensor:
        """Keys ``[most, key_heads, D]`` on the CPU; another salt, other keys of the same kind.

        Always the whole length, to be cut by the caller: a shorter draw would be another one.
        """
        g, generator = self.geometry, self.generator(salt)
        keys = KEYS[self.keys]((self.most, self.key_heads, g.dim), generator)
        if self.keys in _MIXED:
            keys = self._with_zeros_and_ties(keys, generator)
        return self._finish(keys)

    def _with_zeros_and_ties(self, keys: Tensor, generator: torch.Generator) -> Tensor:
        """Set one element and one key in eight to zero, and repeat one unit in eight.

        Real caches have both, and random keys have neither.
        """
        for shape in (keys.shape, (self.most, 1, 1)):
            keys = torch.where(torch.rand(shape, generator=generator) < 1 / 8, 0.0, keys)
        units = keys.unflatten(0, (self.units, -1))
        again = torch.rand(self.units, generator=generator) < 1 / 8
        before = (torch.arange(self.units) - 1).clamp(min=0)
        return torch.where(again[:, None, None, None], units[before], units).flatten(0, 1)

    def queries(self, rows: int, salt: int = 63) -> Tensor:
        """Queries ``[rows, 1, H, D]`` on the CPU, with their weights, see ``weigh``."""
        g, generator = self.geometry, self.generator(salt)
        shape = (rows, 1, g.kv_heads * g.group, g.dim)
        q = self._finish(torch.randn(shape, generator=generator))
        if self.weights is None:
            return q
        return self.weigh(q, self._on_grid(WEIGHTS[self.weights](shape[:3], generator)))

    def weigh(self, q: Tensor, weights: Tensor | None = None) -> Tensor:
        """Queries ``[..., H, D]`` as tests handle them: rows of one tensor.

        Of an indexer, fp32 ``[..., H, D + 1]``: the weight of each head stands behind its query,
        so that what happens to a row happens to both. ``asked`` takes them apart.

        Args:
            weights: ``[..., H]``, ones if None.
        """
        if self.weights is None:
            return q
        weights = torch.ones(q.shape[:-1]) if weights is None else weights
        return torch.cat([q.float(), weights[..., None]], -1)

    def asked(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Queries ``[..., H, D]`` and weights that a hook is given for rows from ``weigh``.

        Weights are fp32 ``[..., H]``, or None without an indexer. Both are dense where rows are.
        """
        if self.weights is None:
            return rows, None
        dim, dense = self.geometry.dim, rows.is_contiguous()
        q, weights = rows.to(self.geometry.dtype)[..., :dim], rows[..., dim]
        return (q.contiguous(), weights.contiguous()) if dense else (q, weights)
