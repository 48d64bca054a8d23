"""Latent attention: FlashInfer's MLA kernel for Hopper (``fa3``), over rows in place.

Its plan is a list of works, spans of tokens of a lane, in a workspace on the device; lengths are
baked into it. Every lane is planned with as many pages as its table has columns, and before each
call a kernel cuts the works down to the true lengths, in place. A work with no token left
becomes ``0 .. 0``, which is how the library itself writes a lane of length 0 (``scheduler.cuh``
1745): it loads nothing (``mla_hopper.cuh`` 921) and gives 0 and -inf (717), which the merge takes
for nothing (``state.cuh`` 57). Lines are those of FlashInfer 0.7.2.

Each of several queries of a row is a lane of its own, over the same pages, with the length that it
sees.

The place of the works in the workspace is no interface of the library: what a plan wrote there is
read back and compared with what was planned, and any other layout is refused.

The log-sum-exp is taken to the base of 2. Where partial results are merged, the threads of a row
each multiply the natural one in place (``mla.cuh`` 804), two warps after one another or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from attrs import frozen
from torch import Tensor

from topkv.hooks.backend import BackendSetup
from topkv.ops import pdl
from topkv.types import ModelShape, Tables
from topkv_flashinfer import kernels, plans
from topkv_flashinfer.providers import Library

LATENT, ROPE = 512, 64
TILE = 64
"""Rows of a work: query heads."""

INFO = 18
"""Numbers in the library's ``MLAPlanInfo``; places of the ones used here."""
CLUSTERS, KV_INDPTR, KV_LEN, KV_START, KV_END, WORK_INDPTR = 1, 3, 11, 13, 14, 15


@frozen
class Works:
    """The works of a plan: what was planned, and the live arrays that the kernel reads.

    Attributes:
        lane: int32 ``[works]``.
        first, behind: int32 ``[works]``, the span of tokens as planned.
        kv_len, kv_start, kv_end: int32 ``[works]``, in the library's workspace.
    """

    lane: Tensor
    first: Tensor
    behind: Tensor
    kv_len: Tensor
    kv_start: Tensor
    kv_end: Tensor

    @property
    def count(self) -> int:
        return self.lane.shape[0]


def works_of(info: Sequence[int], workspace: Tensor, lanes: int, width: int, unit: int) -> Works:
    """Find the works of a plan of ``width`` full pages a lane in its workspace.

    Args:
        info: the plan info of the library.
        workspace: uint8, the plan's integers.
        lanes, width, unit: what was planned.

    Raises:
        RuntimeError: the workspace does not hold what was planned.
    """
    tokens = width * unit
    sizes = [int(number) for number in info]
    problem = None if len(sizes) == INFO else f"{len(sizes)} numbers instead of {INFO}"
    if problem is None:

        def ints(place: int, count: int) -> Tensor:
            return workspace[sizes[place] : sizes[place] + 4 * count].view(torch.int32)

        count = int(ints(WORK_INDPTR, sizes[CLUSTERS] + 1)[-1])
        indptr, length, first, behind = (
            ints(place, count) for place in (KV_INDPTR, KV_LEN, KV_START, KV_END)
        )
        problem = _problem(
            indptr.cpu(), length.cpu(), first.cpu(), behind.cpu(), lanes, width, unit
        )
        if problem is None:
            lane = (indptr // width).int()
            return Works(lane, first.clone(), behind.clone(), length, first, behind)
    raise RuntimeError(
        f"flashinfer: the plan of {lanes} lanes of {tokens} tokens has another layout than that "
        f"of FlashInfer 0.7.2: {problem}. Use that version, or another backend for such layers"
    )


def _problem(
    indptr: Tensor,
    length: Tensor,
    first: Tensor,
    behind: Tensor,
    lanes: int,
    width: int,
    unit: int,
) -> str | None:
    """Return why these are not the works of a plan, None where they are."""
    tokens = width * unit
    if not bool((length == tokens).all()):
        return f"lengths are not all {tokens}"
    if not bool(((indptr % width == 0) & (indptr >= 0) & (indptr < lanes * width)).all()):
        return f"lanes do not start at multiples of {width} pages"
    if not bool(((first >= 0) & (first < behind) & (behind <= tokens)).all()):
        return f"spans of tokens leave 0 .. {tokens}"
    sums = torch.zeros(lanes, dtype=torch.int64)
    sums.index_add_(0, (indptr // width).long(), (behind - first).long())
    if not bool(((sums > 0) & (sums % tokens == 0)).all()):
        return f"spans of a lane do not add up to {tokens} tokens"
    return None


@frozen
class Planned:
    """A wrapper that is planned, the pages that it reads, and its works."""

    wrapper: Any
    pages: plans.Pages
    works: Works


class Latent:
    """``attend`` over latent rows.

    Args:
        library: part ``mla``.
        setup: as the backend gets it.
    """

    def __init__(self, library: Library, setup: BackendSetup) -> None:
        group, device = setup.group, setup.device
        lanes = setup.max_batch * setup.max_queries
        self._library, self._model, self._group, self._device = library, setup.model, group, device
        self._heads = setup.group_size
        self.float, self._early = workspace(device), pdl.available(device)
        width = plans.table_width(group, setup.max_queries)
        self.pages = plans.Pages.empty(lanes, width, device)
        self._plans: dict[tuple[int, int], Planned] = {}
        self._made(lanes, width)  # loads the kernels, and refuses a layout that it does not know

    def attend(self, q: Tensor, k: Tensor, tables: Tables, out: Tensor, lse: Tensor) -> None:
        """See ``topkv.hooks.backend.Backend.attend``; ``k`` are the rows.

        The library takes queries and outputs at any stride; several of a row are rows too.
        """
        queries = q.shape[1]
        planned = self._planned(tables, queries)
        lengths = planned.pages.take(tables, k.shape[2], queries)
        works = planned.works
        kernels.works_kernel[(triton.cdiv(works.count, plans.BLOCK),)](
            *(works.lane, works.first, works.behind, lengths),
            *(works.kv_len, works.kv_start, works.kv_end, works.count),
            BLOCK=plans.BLOCK,
        )
        rows = k[:, 0]
        mine, to, norm = (
            each[:, 0] if queries == 1 else each.view(-1, *each.shape[2:])
            for each in (q, out, lse)
        )
        planned.wrapper.run(
            query=(mine[..., :LATENT], mine[..., LATENT:]),
            kv_cache=(rows[..., :LATENT], rows[..., LATENT:]),
            out=to,
            lse=norm,
            return_lse=True,
        )
        plans.make_natural(lse, self._early)

    def _planned(self, tables: Tables, queries: int) -> Planned:
        """The plan of a shape, made by its first call, which then copies its table."""
        lanes, width = len(tables.table) * queries, tables.table.shape[1]
        planned = self._plans.get((lanes, width))
        if planned is None:
            plans.refuse_capture(self._device, lanes, width)
            planned = self._plans[lanes, width] = self._made(lanes, width)
            tables.attached = None  # the plan has written where the pages are
        return planned

    def _made(self, lanes: int, width: int) -> Planned:
        def ints(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=self._device)

        unit, pages = self._group.unit, self.pages.fitting(lanes, width)
        wrapper = self._library["BatchMLAPagedAttentionWrapper"](
            self.float,
            use_cuda_graph=True,
            qo_indptr=ints(lanes + 1),
            kv_indptr=ints(lanes + 1),
            kv_indices=pages.indices,
            kv_len_arr=ints(lanes),
            backend="fa3",
        )
        plan(
            *(self._library, self._model, wrapper, plans.ramp(lanes, 1), plans.ramp(lanes, width)),
            torch.zeros(lanes * width, dtype=torch.int32),
            torch.full((lanes,), width * unit, dtype=torch.int32),
            unit,
            self._heads,
        )
        plans.settle(self._device)
        backend = wrapper._planned_backend
        works = works_of(backend._plan_info, backend._int_workspace_buffer, lanes, width, unit)
        return Planned(wrapper, pages, works)


def workspace(device: torch.device) -> Tensor:
    """Room for the partial results of every multiprocessor: two tiles of rows, and their sums."""
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return torch.zeros(
        2 * count * TILE * (2 * LATENT + 4) + 4096, dtype=torch.uint8, device=device
    )


def plan(
    library: Library,
    model: ModelShape,
    wrapper: Any,
    queries: Tensor,
    pages: Tensor,
    indices: Tensor,
    lengths: Tensor,
    unit: int,
    heads: int,
) -> None:
    """Plan a wrapper for split rows, without a causal mask, with a log-sum-exp to the base of 2.

    Args:
        library, model, wrapper: of this call.
        queries, pages: int32 ``[lanes + 1]`` first query and page of each lane.
        indices: int32 pages.
        lengths: int32 ``[lanes]`` tokens.
        unit: tokens of a page.
        heads: query heads.
    """
    wrapper.plan(
        metadata=library["MLAPlanMetadata"].csr(queries, pages, indices, lengths),
        num_heads=heads,
        head_dim_ckv=LATENT,
        head_dim_kpe=ROPE,
        page_size=unit,
        causal=False,
        sm_scale=model.scale,
        q_data_type=model.dtype,
        kv_data_type=model.dtype,
        query_layout="split",
        kv_cache_layout="split",
        lse_mode="base2",
    )
