"""The backend: latent attention by FlashMLA's kernels, in place over the rows of a buffer.

Decode over fp8 rows is the library's sparse decode, over bfloat16 rows its sparse prefill kernel
with one query a lane; layers that attend to whole pages of bfloat16 rows take its dense decode.

Where a row has several queries, each is a lane of the sparse kernels, with indices of its own. The
dense decode takes them together under a causal mask, of which the last query sees all: a row with
fewer has its padding in front.

Prompts go through the sparse prefill kernel too: a causal chunk is a selection as well.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from topkv import hookimpl
from topkv.errors import CapabilityError
from topkv.hooks.backend import BackendSetup
from topkv.types import LayerView, Plan, Tables, newest_units
from topkv_authoring.page_table import Listing, adapt_page_table
from topkv_flashmla import kernels, providers
from topkv_flashmla.support import DIM, LATENT, attends_by_pages, refusals

DECODE_MULTIPLE, SPARSE_MULTIPLE = 64, 128
"""Widths of indices that the two kernels take are multiples of these."""

BLOCK, BLOCK_HEADS = 1024, 8
"""Columns of indices, and heads of an output, of a program."""

PAGE = 64
"""Rows of fp8 in a page. The stride of a page must fit into int32, which that of 3.3 million rows
does not."""

PROMPT_ROWS = 2048
"""Rows of a prompt that are attended at once."""


class FlashMLA:
    """Attention over latent rows that are scattered in a buffer, for one group of layers.

    Args:
        setup: latent attention with rows of 512 + 64 elements, at most 128 heads; on a CUDA device
            of capability 9.0.

    Raises:
        CapabilityError: with every reason, a missing library among them.
    """

    def __init__(self, setup: BackendSetup) -> None:
        group = setup.group
        what = f"flashmla cannot serve layers {list(group.layers)}"
        self.provider = providers.BUILDS.require(what, refusals(setup))
        self.model, self.group = setup.model, group
        self.max_batch, self.max_queries = setup.max_batch, setup.max_queries
        self.fp8 = group.dtype is torch.uint8
        self.heads = 64 if setup.group_size <= 64 else 128
        self.by_pages = attends_by_pages(group)
        if not self.by_pages:
            self._make_scratch(setup.device)
        elif self.max_queries > 1:
            shape = (self.max_batch * self.max_queries, setup.group_size, DIM)
            self.shifted = torch.zeros(shape, dtype=self.model.dtype, device=setup.device)

    def _make_scratch(self, device: torch.device) -> None:
        """Indices and padded queries of the sparse kernels."""
        group, rows = self.group, self.max_batch * self.max_queries
        units = group.max_units
        if group.residency == "sparse":
            units = group.select + newest_units(self.max_queries, group.unit)
        tokens = units * group.unit
        self.multiple = DECODE_MULTIPLE if self.fp8 else SPARSE_MULTIPLE
        most = -(-tokens // self.multiple) * self.multiple
        self.indices = torch.full((rows * most,), -1, dtype=torch.int32, device=device)
        self.queries = torch.zeros(
            (rows, 1, self.heads, DIM), dtype=self.model.dtype, device=device
        )
        self._metadata: dict[tuple[int, int], Any] = {}

    @hookimpl
    def adapt_page_table(self, layer: LayerView, plan: Plan, tables: Tables) -> None:
        """See ``topkv.hooks.backend.Backend.adapt_page_table``.

        Where a unit is a row and a row has one query, one kernel writes the library's indices
        along with the table, and they are attached to it.
        """
        table = tables.table
        # ``attend`` refuses more lanes than fit, and the op a table that is too wide.
        fits = len(table) <= self.max_batch and table.shape[1] <= plan.slots.shape[1] + 1
        fits = fits and tables.queries is None
        indices = None
        if fits and layer.group.unit == 1 and not self.by_pages:
            indices = self._indices(len(table), table.shape[1])
        listing = None if indices is None else Listing(indices[:, 0])
        adapt_page_table(layer, plan, tables, "triton", listing)
        tables.attached = indices

    @hookimpl
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, out: Tensor, lse: Tensor
    ) -> None:
        """See ``topkv.hooks.backend.Backend.attend``.

        Copies queries whose rows are further apart than their heads.

        Raises:
            CapabilityError: more queries of a row than ``max_queries`` allows.
            ValueError: more lanes than ``max_batch`` allows.
        """
        lanes, queries = q.shape[:2]
        if not lanes:
            return
        if queries > self.max_queries:
            raise CapabilityError(
                f"flashmla: attend was made for {self.max_queries} queries a row",
                [f"got q {list(q.shape)}, [B, Q, H, D]; raise max_queries when you make it"],
            )
        if lanes > self.max_batch:
            raise ValueError(
                f"flashmla: {lanes} lanes, and it was made for {self.max_batch}; "
                "raise max_requests"
            )
        if self.by_pages:
            result, log = self._attend_pages(q, k, tables)
        else:
            result, log = self._attend_listed(q, k, tables)
        self.finish(result, log, tables, out, lse)

    def finish(
        self, result: Tensor, log: Tensor, tables: Tables, out: Tensor, lse: Tensor
    ) -> None:
        """Copy what the library returns, ``[lanes, Q, heads, 512]``, fp32 ``[lanes, Q, heads]``.

        Heads that it pads are left out; queries that see nothing, padding too, are 0 and -inf.
        """
        lanes, queries, heads, _ = out.shape
        several: dict[str, Any] = {} if tables.queries is None else {
            "QUERIES": queries, "SHIFTED": self.by_pages, "p_queries": tables.queries,
            "s_from_query": result.stride(1), "s_lse_query": log.stride(1),
            "s_out_query": out.stride(1),
        }  # fmt: skip
        kernels.finish_kernel[(lanes * queries, triton.cdiv(heads, BLOCK_HEADS))](
            *(result, log, tables.lengths, out, lse, heads),
            *(result.stride(0), result.stride(2), log.stride(0), log.stride(2)),
            *(out.stride(0), out.stride(2)),
            BLOCK_H=BLOCK_HEADS,
            DIM=LATENT,
            num_warps=4,
            **several,
        )

    def _attend_pages(self, q: Tensor, k: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """Dense decode over ``[pages, 1, 64, 576]``; any number of heads, none are padded.

        Several queries of a row are handed over behind its padding, for the last one sees all.

        The library schedules its splits by the values of ``lengths``. The holder is therefore
        empty in each call: the kernel that fills it runs, or is captured, with the call, and a
        replay schedules anew. Of an empty lane it loads the page in the first column and uses
        nothing of it; what it writes there, 0 and +inf, ``finish_kernel`` replaces.

        Returns:
            ``[lanes, Q, heads, 512]`` and fp32 ``[lanes, Q, heads]``.
        """
        metadata = self.provider.new_metadata()
        options = self.provider.options
        if tables.queries is not None:
            q, options = self._shift(q, tables.queries), {**options, "causal": True}
        result, log = self.provider.decode(
            *(q.contiguous(), k.transpose(1, 2), tables.table, tables.lengths, LATENT, metadata),
            softmax_scale=self.model.scale,
            is_fp8_kvcache=False,
            **options,
        )
        return result, log.mT

    def _shift(self, q: Tensor, counts: Tensor) -> Tensor:
        """The queries of each row behind its padding."""
        lanes, queries, heads, dim = q.shape
        moved = self.shifted[: lanes * queries]
        kernels.shift_kernel[(lanes * queries, triton.cdiv(heads, BLOCK_HEADS))](
            *(q, counts, moved, heads, *q.stride()[:3]),
            QUERIES=queries,
            DIM=dim,
            BLOCK_D=triton.next_power_of_2(dim),
            BLOCK_H=BLOCK_HEADS,
            num_warps=4,
        )
        return moved.view(q.shape)

    def _attend_listed(self, q: Tensor, k: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """The sparse kernels over rows ``[slots, 1, unit, row]``, by the index of each token.

        Returns:
            ``[lanes, Q, heads, 512]`` and fp32 ``[lanes, Q, heads]``, of padded heads.
        """
        lanes, queries, heads, dim = q.shape
        indices: Tensor = tables.attached
        if indices is None:
            indices = self._listed(tables, queries, k.shape[2])
        if heads != self.heads or not q.is_contiguous():
            padded = self.queries[: lanes * queries].view(lanes, queries, self.heads, dim)
            padded[:, :, :heads].copy_(q)
            q = padded
        q = q.view(lanes * queries, 1, self.heads, dim)
        rows = k.transpose(1, 2).reshape(-1, 1, k.shape[3])
        if self.fp8:
            result, log = self._decode(q, rows, indices)
            result, log = result[:, 0], log[:, :, 0]
        else:
            result, _, log = self.provider.sparse(
                q[:, 0], rows, indices, self.model.scale, **self.provider.options
            )
        return result.unflatten(0, (lanes, queries)), log.unflatten(0, (lanes, queries))

    def _listed(self, tables: Tables, queries: int, unit: int) -> Tensor:
        """Indices of the tokens that each query sees, ``[lanes * Q, 1, width]``."""
        table, lanes = tables.table, len(tables.table) * queries
        indices = self._indices(lanes, table.shape[1] * unit)
        width = indices.shape[2]
        kernels.indices_kernel[(lanes, triton.cdiv(width, BLOCK))](
            *(table, tables.lengths, indices, width, table.stride(0), indices.stride(0)),
            UNIT=unit,
            BLOCK=BLOCK,
            QUERIES=queries,
            p_queries=tables.queries,
        )
        return indices

    def _indices(self, lanes: int, tokens: int) -> Tensor:
        """The library's indices, ``[lanes, 1, width]``, as wide as N tokens need."""
        width = -(-tokens // self.multiple) * self.multiple
        return self.indices[: lanes * width].view(lanes, 1, width)

    def _decode(self, q: Tensor, rows: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Sparse decode over fp8 rows ``[tokens, 1, 656]``, in pages of ``PAGE`` or fewer.

        The scheduler's metadata depends on shapes alone, so one holder serves every layer and
        step of a batch size and width of indices; one that is filled while a graph is captured
        belongs to the graph.
        """
        shape = q.shape[0], indices.shape[2]
        metadata = self._metadata.get(shape)
        if metadata is None:
            metadata = self.provider.new_metadata()
            if not torch.cuda.is_current_stream_capturing():
                self._metadata[shape] = metadata
        pages = rows.unflatten(0, (-1, math.gcd(len(rows), PAGE)))
        result, log = self.provider.decode(
            *(q, pages, None, None, LATENT, metadata),
            softmax_scale=self.model.scale,
            is_fp8_kvcache=True,
            indices=indices,
            **self.provider.options,
        )
        return result, log

    @hookimpl
    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, q_start: int, k_start: int, out: Tensor, lse: Tensor
    ) -> None:
        every = torch.arange(len(k), dtype=torch.int32, device=q.device).expand(len(q), -1)
        self.prefill_selected(q, k, v, q_start, k_start, every, out, lse)

    @hookimpl
    def prefill_selected(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_start: int,
        k_start: int,
        ids: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        heads, scale, k = q.shape[1], self.model.scale, k.contiguous()
        for first in range(0, len(q), PROMPT_ROWS):
            part = slice(first, first + PROMPT_ROWS)
            indices, counts = self._shown(ids[part], q_start - k_start + first)
            queries = q[part]
            if heads < self.heads:  # without any, padding is a copy
                queries = torch.nn.functional.pad(queries, (0, 0, 0, self.heads - heads))
            result, _, log = self.provider.sparse(
                *(queries.contiguous(), k, indices[:, None], scale),
                topk_length=counts.clamp(min=1),
                **self.provider.options,
            )
            seen = Tables(indices, counts)
            self.finish(
                *(result[:, None], log[:, None], seen),
                *(out[part][:, None], lse[part][:, None]),
            )

    def _shown(self, ids: Tensor, ahead: int) -> tuple[Tensor, Tensor]:
        """See ``reference.shown``; indices have the width that the library wants."""
        rows, width = ids.shape
        room = max(-(-width // SPARSE_MULTIPLE) * SPARSE_MULTIPLE, SPARSE_MULTIPLE)
        indices = torch.empty((rows, room), dtype=torch.int32, device=ids.device)
        counts = torch.empty(rows, dtype=torch.int32, device=ids.device)
        kernels.shown_kernel[(rows,)](
            *(ids, indices, counts, width, room, ahead, ids.stride(0)), BLOCK=BLOCK
        )
        return indices, counts
