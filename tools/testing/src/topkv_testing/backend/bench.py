"""Shapes, guarded memory, the float64 oracle and its tolerance, for all of the backend suite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from attrs import astuple, frozen
from hypothesis import strategies as st
from torch import Tensor

from topkv.hooks.backend import BackendSetup
from topkv.types import GroupShape, ModelShape
from topkv_testing.kit import Subject
from topkv_testing.models.oracle import attention
from topkv_testing.strategies import Geometry, geometries
from topkv_testing.strategies import stated as values_of
from topkv_testing.tolerance import assert_as_good

SENTINEL = -77
"""Value around results, and in integer results before a call."""
_GUARD = 256
"""Elements before and behind a guarded tensor; keeps it aligned."""
_SCALE = 0.75
"""Scale of the logits times ``D ** 0.5``: not 1, so that another scale is noticed."""


@frozen
class BackendOptions:
    """Values that the suite draws from, within what the entry states.

    Attributes:
        units: tokens of a unit; those outside ``capabilities.units`` are left out.
        groups: query heads per kv-head; those above ``capabilities.max_group`` are left out.
        dims: head dims, where ``capabilities.head_dims`` states none.
        dtypes: names of dtypes; those that ``capabilities.dtypes`` lacks are left out.
        rounded_sums: the backend adds up weights that it has rounded to the dtype of the queries,
            as a matrix unit does, so that its log-sum-exps may be half an eps off; float32 sums
            are held to float32.
    """

    units: tuple[int, ...] = (1, 2, 16, 64, 128)
    groups: tuple[int, ...] = (1, 2, 3, 4, 7, 8, 16)
    dims: tuple[int, ...] = (8, 64, 128)
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    rounded_sums: bool = False


def rounded_sums(subject: Subject) -> bool:
    """``rounded_sums`` of ``BackendOptions``."""
    return isinstance(subject.options, BackendOptions) and subject.options.rounded_sums


def _options(subject: Subject) -> BackendOptions:
    if "gqa" not in subject.entry.capabilities.attention:
        pytest.skip(f"{subject.entry.name} states no grouped-query attention")
    options = subject.options or BackendOptions()
    if not isinstance(options, BackendOptions):
        raise TypeError(
            f"the fixture 'options' of a backend suite must return BackendOptions or None, "
            f"got {options!r}"
        )
    return options


def backend_geometries(
    subject: Subject, kv_heads: Sequence[int] = (1, 2, 3)
) -> st.SearchStrategy[Geometry]:
    """Geometries that the entry states.

    Args:
        subject: the backend; skips if it states no grouped-query attention.
        kv_heads: to draw from.
    """
    options, capabilities = _options(subject), subject.entry.capabilities
    return geometries(
        capabilities,
        kv_heads=kv_heads,
        groups=options.groups,
        dims=capabilities.head_dims or options.dims,
        units=options.units,
        page_units=(1,),
        dtypes=options.dtypes,
    )


def plain_geometries(subject: Subject) -> list[Geometry]:
    """A few fixed geometries: each scope, two kv-heads, small and larger units."""
    options, stated = _options(subject), subject.entry.capabilities
    units, groups, names = (
        values_of(stated, name, getattr(options, name)) for name in ("units", "groups", "dtypes")
    )
    dim = (stated.head_dims or options.dims)[0]
    group = min(groups, key=lambda each: abs(each - 3))
    return [
        Geometry(2, group, dim, unit, 1, scope, getattr(torch, names[0]))
        for scope in stated.scopes or ("kv_head", "shared")
        for unit in dict.fromkeys((units[0], min(units, key=lambda each: abs(each - 16))))
    ]


def make_backend(
    subject: Subject,
    geometry: Geometry,
    max_batch: int,
    *,
    requests: int = 8,
    select: int = 8,
    buffer: int = 8,
    ring: int = 2,
    residency: str = "sparse",
    max_queries: int = 1,
) -> tuple[Any, ModelShape, GroupShape]:
    """Make an instance; return it with the shapes that it was made for.

    Args:
        subject: the backend.
        geometry: of the group.
        max_batch: most decode rows of a call.
        requests, select, buffer, ring, residency: see ``topkv.types.GroupShape``.
        max_queries: most queries of a row.
    """
    g = geometry
    model = ModelShape(1, g.kv_heads * g.group, g.kv_heads, g.dim, g.dtype, _SCALE * g.dim**-0.5)
    per_lane = g.kv_heads // g.lane_heads
    group = GroupShape(
        *((0,), g.unit, g.lane_heads, per_lane, g.dim, g.dtype, g.page_tokens),
        *(requests, 2**20, select, buffer, ring, residency),
    )
    sizes = (max_batch, model.group_size)
    setup = BackendSetup(model, group, subject.tier.device, *sizes, max_queries=max_queries)
    return subject.make(setup), model, group


@frozen(eq=False)
class Guarded:
    """A tensor with memory before and behind it that nobody may write.

    Attributes:
        whole: all of the memory.
        body: the tensor, contiguous.
    """

    whole: Tensor
    body: Tensor

    @classmethod
    def full(
        cls, shape: Sequence[int], fill: float, guard: float, dtype: torch.dtype, device: Any
    ) -> Guarded:
        """``body`` filled with ``fill`` and ``guard`` around it."""
        size = torch.Size(shape).numel()
        whole = torch.full((size + 2 * _GUARD,), guard, dtype=dtype, device=device)
        body = whole[_GUARD : _GUARD + size].view(tuple(shape))
        body.fill_(fill)
        return cls(whole, body)

    @classmethod
    def of(cls, values: Tensor, guard: float, device: Any) -> Guarded:
        """A copy of ``values`` with ``guard`` around it."""
        made = cls.full(values.shape, 0, guard, values.dtype, device)
        made.body.copy_(values)
        return made

    def assert_intact(self, what: str) -> None:
        """Assert that nothing was written around ``body``, whose guard is ``SENTINEL``."""
        around = torch.cat([self.whole[:_GUARD], self.whole[-_GUARD:]])
        assert bool((around == SENTINEL).all()), f"memory around {what} was written"


def result(shape: Sequence[int], dtype: torch.dtype, device: Any) -> Guarded:
    """Memory for a result: NaN (or -77 for integers), with ``SENTINEL`` around it."""
    fill = float("nan") if dtype.is_floating_point else SENTINEL
    return Guarded.full(shape, fill, SENTINEL, dtype, device)


def assert_unchanged(call: Callable[[], object], inputs: dict[str, Tensor]) -> None:
    """Run ``call`` and compare each contiguous input, bit for bit, with what it was before."""
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    call()
    for name, tensor in inputs.items():
        bits, old = tensor.view(torch.uint8), before[name].view(torch.uint8)
        assert torch.equal(bits, old), f"the call changed its input {name}"


@frozen(eq=False)
class Expected:
    """The true result of attention, and how far from it a backend may be.

    Attributes:
        out, lse: the truth, float64 ``[m, H, D]`` and ``[m, H]``.
        rough_out: plain torch in the dtype of the inputs.
        rough_lse: the same in float32, as a log-sum-exp is.
        drift: what a few float32 roundings of the largest logit move a logit by.
        size: largest magnitude among the values.
        rounding: relative error of a number in the dtype of the queries.
    """

    out: Tensor
    lse: Tensor
    rough_out: Tensor
    rough_lse: Tensor
    drift: float
    size: float
    rounding: float

    def check(self, out: Tensor, lse: Tensor, rounded_sums: bool = False) -> None:
        """Compare; a query that sees nothing must give exactly 0.

        ``rounded_sums`` is that of ``BackendOptions``.
        """
        slack = self.drift + (self.rounding if rounded_sums else 0.0)
        assert_as_good(lse, self.lse, self.rough_lse, "lse", slack)
        assert_as_good(out, self.out, self.rough_out, "out", 2 * self.drift * self.size)
        empty = (self.lse == -torch.inf).to(out.device)
        assert not bool(out[empty].any()), "a query that sees nothing must give 0"


def expect(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> Expected:
    """Compute the oracle.

    Args:
        q: ``[m, H, D]``.
        k, v: ``[n, Hkv, D]``, of the tokens that are attended.
        scale: factor of the logits.
        mask: bool ``[m, n]``, True where a query sees a key.
    """
    out, lse = attention(q, k, v, scale, mask)
    group, dtype = q.shape[1] // k.shape[1], q.dtype
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    logits = torch.einsum("mhd,nhd->mhn", q.float(), keys) * scale
    reach = torch.einsum("mhd,nhd->mhn", q.float().abs(), keys.abs()) * abs(scale)
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None], -torch.inf)
    rough_lse = torch.logsumexp(logits, -1)
    # As every fused kernel does it: sums in float32, weights and result in the dtype.
    weights = torch.softmax(logits, -1).nan_to_num(0.0).to(dtype)
    rough_out = torch.einsum("mhn,nhd->mhd", weights.float(), values).to(dtype)
    furthest = max(1.0, float(reach.max())) if reach.numel() else 1.0
    size = float(values.abs().max()) if values.numel() else 0.0
    drift = 8 * torch.finfo(torch.float32).eps * furthest
    rounding = torch.finfo(dtype).eps / 2
    return Expected(out, lse, rough_out, rough_lse, drift, size, rounding)


def columns_of(keep: Tensor) -> Tensor:
    """Return the columns of a mask, as ``prefill_selected`` takes them.

    Args:
        keep: bool ``[m, n]``.

    Returns:
        int32 ``[m, n]``, -1 in place of what is not kept.
    """
    return torch.where(keep, torch.arange(keep.shape[1], device=keep.device), -1).int()


def joined(parts: Sequence[Expected]) -> Expected:
    """Join the oracles of several lanes, ``[Q, H, D]`` each: ``[N * Q, H, D]``."""
    columns = zip(*(astuple(part, recurse=False) for part in parts), strict=True)
    whole: Any = (torch.cat(c) if isinstance(c[0], Tensor) else max(c) for c in columns)
    return Expected(*whole)
