"""Decode over keys and values: FlashInfer's paged decode, planned once for a shape.

``plan`` schedules on the host, for lengths that it takes to be known. topkv's are known on the
device alone and change between the replays of a graph. So every lane is planned with as many
pages as its table has columns, and the kernels get the true lengths from the device. That is
right for the tensor-core kernel (``fa2``; lines are those of FlashInfer 0.7.2):

* a lane's length is that of its pages but the last, and the tokens of the last, modulo 2**32
  (``page.cuh`` 185). So all lanes keep their constant count of pages, and only the tokens "of the
  last page" change; they are negative where a lane ends earlier;
* it cuts a lane's chunk of the schedule to that length, at the beginning too (``prefill.cuh``
  3829), so that one behind the end has no token, no iteration, a result of 0 and a log-sum-exp of
  -inf, as a lane of length 0 has;
* partial results of a single query are at the place of their chunk, whatever the length (3872,
  4333), and each planned chunk writes one;
* what merges them takes -inf for nothing (``state.cuh`` 57), also where all are.

Each of several queries of a row is a lane of its own, over the same pages, with the length that it
sees. The library's wrapper for several queries a lane would not do: it puts the partial results of
a query behind as many as the true length gives each query before it (4293), and merges them from
where as many as were planned would be.

The CUDA-core kernel does not: a chunk behind the end has an unsigned size below zero
(``decode.cuh`` 438). The library's programmatic dependent launch is off: with it the kernel would
read lengths (``prefill.cuh`` 3819) before it waits for the kernel that writes them (3878).
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from topkv.hooks.backend import BackendSetup
from topkv.ops import pdl
from topkv.types import Tables
from topkv_flashinfer import plans
from topkv_flashinfer.providers import Library


@frozen
class Planned:
    """A wrapper that is planned, and what it reads.

    Attributes:
        wrapper: ``BatchDecodeWithPagedKVCacheWrapper``.
        pages: of this shape and of others.
    """

    wrapper: Any
    pages: plans.Pages


class Decode:
    """``attend`` of grouped queries.

    Args:
        library: part ``gqa``.
        setup: as the backend gets it.
    """

    def __init__(self, library: Library, setup: BackendSetup) -> None:
        model, group, device = setup.model, setup.group, setup.device
        lanes = setup.max_batch * group.lane_heads * setup.max_queries
        self._library, self._model, self._group = library, model, group
        self._device, self._early = device, pdl.available(device)
        self._heads = group.heads_per_lane * setup.group_size
        width = plans.table_width(group, setup.max_queries)
        self.pages = plans.Pages.empty(lanes, width, device)
        shape = (lanes, self._heads, model.head_dim)
        self._staged = torch.empty(shape, dtype=model.dtype, device=device)
        self._float = torch.zeros(16, dtype=torch.uint8, device=device)
        # Both sizes grow with the lanes and do not depend on the width. Asking loads the kernels.
        float_bytes, self._int_bytes = self._made(lanes, width).wrapper.workspace_size(
            *self._shape(lanes, width), **self._types()
        )
        self._float = torch.zeros(float_bytes, dtype=torch.uint8, device=device)
        self._plans: dict[tuple[int, int], Planned] = {}

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, out: Tensor, lse: Tensor
    ) -> None:
        """See ``topkv.hooks.backend.Backend.attend``.

        The library takes queries at any stride, and writes contiguous outputs.
        """
        queries = q.shape[1]
        planned = self._planned(tables, queries)
        planned.pages.take(tables, k.shape[2], queries)
        lanes = len(tables.table) * queries
        shape = (lanes, self._heads, self._model.head_dim)
        target = out.view(shape) if out.is_contiguous() else self._staged[:lanes]
        planned.wrapper.run(
            q.reshape(shape),
            (k, v),
            out=target,
            lse=lse.view(shape[:2]),
            return_lse=True,
            enable_pdl=False,
        )
        if target.data_ptr() != out.data_ptr():
            out.copy_(target.view(out.shape))
        plans.make_natural(lse, self._early)

    def _planned(self, tables: Tables, queries: int) -> Planned:
        """The plan of a shape, made by its first call, which then copies its table.

        Not before: the library fetches further tensors in the first ``run``, which a capture
        cannot hold either, so a plan says that its shape has run.
        """
        lanes, width = len(tables.table) * queries, tables.table.shape[1]
        planned = self._plans.get((lanes, width))
        if planned is None:
            plans.refuse_capture(self._device, lanes, width)
            planned = self._made(lanes, width)
            small = torch.zeros(self._int_bytes, dtype=torch.uint8, device=self._device)
            planned.wrapper.reset_workspace_buffer(self._float, small)
            planned.wrapper.plan(*self._shape(lanes, width), **self._types())
            tables.attached = None  # the plan has written where the pages are
            plans.settle(self._device)
            self._plans[lanes, width] = planned
        return planned

    def _made(self, lanes: int, width: int) -> Planned:
        """A wrapper of N lanes, without a plan."""
        pages = self.pages.fitting(lanes, width)
        indptr = torch.zeros(lanes + 1, dtype=torch.int32, device=self._device)
        wrapper = self._library["BatchDecodeWithPagedKVCacheWrapper"](
            self._float,
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=pages.indices,
            paged_kv_last_page_len_buffer=pages.last[:lanes],
            backend="fa2",
        )
        return Planned(wrapper, pages)

    def _shape(self, lanes: int, width: int) -> tuple[Any, ...]:
        """Positional arguments of a plan: ``width`` full pages a lane."""
        unit = self._group.unit
        return (
            plans.ramp(lanes, width),
            torch.zeros(lanes * width, dtype=torch.int32),
            torch.full((lanes,), unit, dtype=torch.int32),
            *(self._heads, self._group.heads_per_lane, self._model.head_dim, unit),
        )

    def _types(self) -> dict[str, Any]:
        """Keyword arguments of a plan."""
        dtype = self._model.dtype
        return {
            "q_data_type": dtype,
            "kv_data_type": dtype,
            "o_data_type": dtype,
            "sm_scale": self._model.scale,
            "logits_soft_cap": self._model.softcap,
        }
