"""What the algorithm suite draws: a case, and what an author may say beyond the entry."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, field, frozen
from hypothesis import strategies as st
from torch import Tensor

from topkv.testing.kit import Subject
from topkv.testing.strategies import KEYS, Geometry, geometries, seeds

if TYPE_CHECKING:
    from topkv.testing.algorithm_bench import AlgorithmBench


@frozen
class AlgorithmOptions:
    """What an author tells the suite; the fixture ``options`` returns it.

    Attributes:
        params: strategy of parameter dicts; what a dict leaves out has the entry's default.
        promised: ``(length, bench) -> units`` that every selection of a request of that length
            holds, such as sinks. None where nothing is promised.
        geometry: keyword arguments of ``strategies.geometries``, such as ``{"units": (4,)}``;
            ``groups`` and ``dims`` are those of the index where the entry says ``needs_index``.
        selects: widths K that are drawn; each must be possible with all ``params``.
        units: units of the longest request, rounded up to pages.
        hidden_needles: a unit is judged by its best key: one key that matches is found among
            keys that point the other way. Mean-pooled representations cannot promise it.
        head_needles: every query head of a group finds the unit that it alone looks for, given
            room in the budget. Averaging queries before they are scored cannot promise it.
        by_key: ``(pool name, pool) -> pool`` with what is kept of each unit or token in its row.
            For pools that pack a page otherwise, such as codes in front and scales behind them.
        oracle: ``(bench, slot, q) -> scores``, the algorithm's formula in float64, written apart
            from the plugin's code: of ``bench.keys[slot]`` and queries q ``[1, H, D]`` (of an
            indexer as ``bench.case.asked`` takes them apart) the scores ``[lane_heads, units]`` of
            all selectable units, on the CPU; promised ones have any. Selections of reference and
            kernels are compared with it, up to ties. None where there is no score for each unit.
        mass: attention mass, or share of all index scores, by which the selection of the kernels
            may differ from the reference, and share of the largest score by which a selection may
            differ from the oracle: what a tie in their arithmetic can be worth.
        long_units: units of the request on which kernels are tried once: enough for several
            blocks of them.
    """

    params: st.SearchStrategy[dict[str, Any]] = field(factory=lambda: st.just({}))
    promised: Callable[[int, AlgorithmBench], set[int]] | None = None
    geometry: Mapping[str, Any] = field(factory=dict)
    selects: Sequence[int] = (1, 2, 3, 5)
    units: int = 12
    hidden_needles: bool = False
    head_needles: bool = False
    by_key: Callable[[str, Tensor], Tensor] | None = None
    oracle: Callable[[AlgorithmBench, int, Tensor], Tensor] | None = None
    mass: float = 1e-5
    long_units: int = 300


def options_of(subject: Subject) -> AlgorithmOptions:
    """The subject's options, the defaults where it has none."""
    return AlgorithmOptions() if subject.options is None else subject.options


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
    ``dim`` elements a token, ``group`` queries, and a weight for each of them.

    Exact data lie on a coarse grid: multiples of 1/4 up to 8, which every 16-bit dtype holds,
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
        stale: what the ring holds where no token of the open unit lies. NaN shows most stray
            reads; a large number shows those of kernels whose minimum and maximum drop NaN.
        exact: data on the grid.
        weights: name in ``WEIGHTS``; None for a model without an indexer.
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
        """Keys ``[most, Hkv, D]`` on the CPU; another salt, other keys of the same kind.

        Always the whole length, to be cut by the caller: a shorter draw would be another one.
        """
        g, generator = self.geometry, self.generator(salt)
        keys = KEYS[self.keys]((self.most, g.kv_heads, g.dim), generator)
        if self.keys in _MIXED:
            keys = self._with_zeros_and_ties(keys, generator)
        return self._finish(keys)

    def _with_zeros_and_ties(self, keys: Tensor, generator: torch.Generator) -> Tensor:
        """Of eight elements one is zero, and of eight keys; of eight units one repeats another.

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
        """What a hook is given of rows from ``weigh``: queries ``[..., H, D]`` and weights.

        Weights are fp32 ``[..., H]``, or None without an indexer. Both are dense where rows are.
        """
        if self.weights is None:
            return rows, None
        dim, dense = self.geometry.dim, rows.is_contiguous()
        q, weights = rows.to(self.geometry.dtype)[..., :dim], rows[..., dim]
        return (q.contiguous(), weights.contiguous()) if dense else (q, weights)


# Hypothesis tries the first values first and shrinks to them: a shape in which all parts count.
_SHAPES: Mapping[str, Any] = {
    "kv_heads": (2, 1, 3),
    "groups": (2, 1, 4),
    "units": (4, 1, 2, 16),
    "page_units": (2, 1, 4),
}

# All heads of an indexer share the key of a token, and tokens are selected one by one.
_INDEX_SHAPES: Mapping[str, Any] = {"kv_heads": (1,), "units": (1,)}

# Each shape compiles its kernels anew on a GPU, which takes longer than a test does.
_GPU_SHAPES: Mapping[str, Any] = {
    "kv_heads": (2,),
    "groups": (2,),
    "dims": (12,),
    "units": (4, 1),
    "page_units": (2,),
    "dtypes": ("bfloat16", "float32"),
}


def cases(
    subject: Subject,
    *,
    keys: Sequence[str] = ("normal", *sorted(set(KEYS) - {"normal"})),
    exact: bool = True,
    **geometry: Any,
) -> st.SearchStrategy[Case]:
    """Cases that the subject's entry and options allow.

    Args:
        subject: the plugin.
        keys: kinds of keys.
        exact: data on the grid.
        geometry: keyword arguments of ``strategies.geometries``; those of the options win.
    """
    options, capabilities = options_of(subject), subject.entry.capabilities
    wide = _GPU_SHAPES if subject.tier.name == "gpu" else _SHAPES
    drawn, weights = {**wide, **geometry, **options.geometry}, st.none()
    if capabilities.needs_index:
        # What the entry says of heads is about the model's, see ``algorithm_memory``.
        capabilities = evolve(capabilities, head_dims=None, max_group=None)
        drawn, weights = {**drawn, **_INDEX_SHAPES}, st.sampled_from(tuple(WEIGHTS))
    shapes = geometries(capabilities, **drawn)

    return st.builds(
        Case,
        geometry=shapes,
        params=options.params,
        select=st.sampled_from(options.selects),
        ring=st.sampled_from((2, 3)),
        keys=st.sampled_from(keys),
        seed=seeds(),
        least_units=st.just(options.units),
        stale=st.sampled_from((96.0, math.nan)),
        exact=st.just(exact),
        weights=weights,
    )
