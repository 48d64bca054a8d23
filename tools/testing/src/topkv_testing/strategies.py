"""Hypothesis strategies for shapes, lengths, selections and keys of a tiered cache.

They draw small Python values and seeds; tensors are made from a drawn seed, so that an example
prints as a few numbers and shrinks well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from attrs import frozen
from hypothesis import strategies as st
from torch import Tensor

from topkv.entries import Capabilities

INT32 = (-(2**31), 2**31 - 1)


@frozen
class Geometry:
    """The shape of one group of layers.

    Attributes:
        kv_heads, group, dim: kv-heads, query heads of each, head dim.
        unit: tokens of a unit.
        page_units: units of a page.
        scope: ``"kv_head"`` or ``"shared"``.
        dtype: of keys and values.
    """

    kv_heads: int
    group: int
    dim: int
    unit: int
    page_units: int
    scope: str
    dtype: torch.dtype

    @property
    def lane_heads(self) -> int:
        return self.kv_heads if self.scope == "kv_head" else 1

    @property
    def page_tokens(self) -> int:
        return self.page_units * self.unit


def geometries(
    capabilities: Capabilities | None = None,
    *,
    kv_heads: Sequence[int] = (1, 2, 3),
    groups: Sequence[int] = (1, 2, 4),
    dims: Sequence[int] = (4, 12, 16),
    units: Sequence[int] = (1, 2, 4, 16),
    page_units: Sequence[int] = (1, 2, 4),
    dtypes: Sequence[str] = ("float32", "bfloat16", "float16"),
) -> st.SearchStrategy[Geometry]:
    """Geometries, narrowed to what a plugin states where ``capabilities`` are given.

    Raises:
        ValueError: the plugin states none of the values that are offered.
    """
    c = capabilities or Capabilities()
    given = {
        "kv_heads": kv_heads,
        "groups": groups,
        "dims": dims,
        "units": units,
        "page_units": page_units,
        "scopes": c.scopes or ("kv_head", "shared"),
        "dtypes": dtypes,
    }
    drawn = []
    for name, values in given.items():
        kept = stated(c, name, values)
        if not kept:
            raise ValueError(f"geometries: the plugin states none of the {name} {tuple(values)}")
        drawn.append(st.sampled_from(kept))
    return st.builds(geometry, *drawn)


def stated(capabilities: Capabilities, name: str, values: Sequence[Any]) -> list[Any]:
    """The values of one argument of ``geometries`` that a plugin states."""
    c = capabilities
    low, high = c.units or (1, 2**30)
    takes: dict[str, Callable[[Any], bool]] = {
        "groups": lambda group: c.max_group is None or group <= c.max_group,
        "dims": lambda dim: c.head_dims is None or dim in c.head_dims,
        "units": lambda unit: low <= unit <= high,
        "dtypes": lambda dtype: c.dtypes is None or dtype in c.dtypes,
    }
    return [each for each in values if name not in takes or takes[name](each)]


def geometry(
    kv_heads: int, groups: int, dims: int, units: int, page_units: int, scopes: str, dtypes: str
) -> Geometry:
    """A geometry of one value of each argument of ``geometries``, and of a scope."""
    return Geometry(kv_heads, groups, dims, units, page_units, scopes, getattr(torch, dtypes))


def lengths(unit: int, page_tokens: int, most: int, least: int = 1) -> st.SearchStrategy[int]:
    """Lengths, most of them at or beside the edge of a unit or a page."""
    edges = {least, most}
    for step in (unit, page_tokens):
        for edge in range(0, most + 1, step):
            edges |= {edge - 1, edge, edge + 1}
    near = sorted(edge for edge in edges if least <= edge <= most)
    return st.one_of(st.sampled_from(near), st.integers(least, most))


def batches(slots: Sequence[int], most: int) -> st.SearchStrategy[list[int]]:
    """Rows of a decode batch: some of the slots in any order, padded with -1 in between."""
    return st.sets(st.sampled_from(slots), min_size=1, max_size=min(most, len(slots))).flatmap(
        lambda chosen: st.permutations([*chosen, *[-1] * (most - len(chosen))])
    )


def adversarial_ids(limit: int, width: int) -> st.SearchStrategy[list[int]]:
    """A selection as no algorithm should make it: duplicates, -1 inside, ids out of range."""
    wild = st.one_of(
        st.integers(-3, limit + 3),
        st.sampled_from([-1, 0, max(limit - 1, 0), limit, *INT32]),
    )
    few = st.lists(wild, min_size=1, max_size=2).flatmap(
        lambda some: st.lists(st.sampled_from(some), min_size=width, max_size=width)
    )
    return st.one_of(st.lists(wild, min_size=width, max_size=width), few)


def row_formats() -> st.SearchStrategy[tuple[torch.dtype, int, int]]:
    """``(dtype, D, planes)`` of rows as latent and low-precision caches have them.

    656 bytes a token are DeepSeek's fp8 latent with scales, 1152 its bf16 latent with RoPE, 584
    and 256 other formats in use: one row a token, or two halves.
    """
    sizes, planes = st.sampled_from([656, 1152, 584, 256]), st.sampled_from([1, 2])
    byte_rows = st.tuples(sizes, planes).map(lambda row: (torch.uint8, row[0] // row[1], row[1]))
    return st.one_of(
        byte_rows,
        st.sampled_from([(torch.float32, 4, 2), (torch.bfloat16, 8, 2), (torch.bfloat16, 576, 1)]),
    )


def page_table(requests: int, pages: int, seed: int) -> Tensor:
    """int32 ``[requests, pages]``: host pages from 1 on, in random order, none twice."""
    generator = torch.Generator().manual_seed(seed)
    order = 1 + torch.randperm(requests * pages, generator=generator)
    return order.view(requests, pages).to(torch.int32)


def _normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(tuple(shape), generator=generator)


def _constant(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(tuple(shape[1:]), generator=generator).expand(tuple(shape)).clone()


def _ties(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randint(-1, 2, tuple(shape), generator=generator).float()


def _heavy(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    exponents = torch.randint(-12, 5, tuple(shape), generator=generator)
    return torch.randn(tuple(shape), generator=generator) * 2.0**exponents


KEYS: dict[str, Callable[[Sequence[int], torch.Generator], Tensor]] = {
    "normal": _normal,
    "constant": _constant,
    "ties": _ties,
    "heavy": _heavy,
}
"""Ways to make float32 keys ``[n, Hkv, D]``: all alike, of few values, of very many sizes."""


def key_kinds() -> st.SearchStrategy[str]:
    """A name in ``KEYS``."""
    return st.sampled_from(sorted(KEYS))


def selections(
    universe: int, width: int, overlap: float, how: str, seed: int
) -> Iterator[list[int]]:
    """An endless stream of selections, each of which shares a part with the one before it.

    Args:
        universe: ids ``0 .. universe - 1``.
        width: ids of a selection.
        overlap: share of the ids that stay.
        how: ``"sliding"``, a window that moves on, or ``"jumping"``, random ids that are replaced
            by random ones.
        seed: of the random choice.
    """
    generator = torch.Generator().manual_seed(seed)
    leaving = width - round(width * overlap)
    start, current = 0, torch.randperm(universe, generator=generator)[:width]
    while True:
        if how == "sliding":
            yield [(start + i) % universe for i in range(width)]
            start += leaving
            continue
        yield current.tolist()
        kept = current[torch.randperm(width, generator=generator)[leaving:]]
        others = torch.randperm(universe, generator=generator)
        fresh = others[~torch.isin(others, current)][:leaving]
        current = torch.cat([kept, fresh])


def seeds() -> st.SearchStrategy[int]:
    """Seeds of tensors."""
    return st.integers(0, 2**16 - 1)
