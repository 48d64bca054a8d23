"""The backend: latent attention by FlashMLA's kernels, in place over the rows of a buffer.

Decode over fp8 rows is the library's sparse decode, over bfloat16 rows its sparse prefill kernel
with one query a lane; layers that attend to whole pages of bfloat16 rows take its dense decode.
Prompts go through the sparse prefill kernel too: a causal chunk is a selection as well.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from topkv import hookimpl
from topkv.hooks.backend import BackendSetup
from topkv.types import LayerView, Plan, Tables
from topkv_authoring.page_table import Listing, adapt_page_table
from topkv_flashmla import kernels, providers, reference
from topkv_flashmla.support import DIM, LATENT, attends_by_pages, refusals

DECODE_MULTIPLE, SPARSE_MULTIPLE = 64, 128
"""Widths of indices that the two kernels take are multiples of these."""

BLOCK, BLOCK_HEADS = 1024, 8
"""Columns of indices, and heads of an output, of a program."""

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
        self.max_batch = setup.max_batch
        self.fp8 = group.dtype is torch.uint8
        self.heads = 64 if setup.group_size <= 64 else 128
        self.by_pages = attends_by_pages(group)
        if not self.by_pages:
            self._make_scratch(setup.device)

    def _make_scratch(self, device: torch.device) -> None:
        """Indices and padded queries of the sparse kernels."""
        group, max_batch = self.group, self.max_batch
        sparse = group.residency == "sparse"
        tokens = (group.select + 1) * group.unit if sparse else group.max_units * group.unit
        self.multiple = DECODE_MULTIPLE if self.fp8 else SPARSE_MULTIPLE
        most = -(-tokens // self.multiple) * self.multiple
        self.indices = torch.full((max_batch * most,), -1, dtype=torch.int32, device=device)
        self.queries = torch.zeros(
            (max_batch, 1, self.heads, DIM), dtype=self.model.dtype, device=device
        )
        self._metadata: dict[int, Any] = {}

    @hookimpl
    def adapt_page_table(self, layer: LayerView, plan: Plan, tables: Tables) -> None:
        """See ``topkv.hooks.backend.Backend.adapt_page_table``.

        Where a unit is a row, one kernel writes the library's indices along with the table, and
        they are attached to it.
        """
        table = tables.table
        # ``attend`` refuses more lanes than fit, and the op a table that is too wide.
        fits = len(table) <= self.max_batch and table.shape[1] <= plan.slots.shape[1] + 1
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
            ValueError: more lanes than ``max_batch`` allows.
        """
        lanes = q.shape[0]
        if not lanes:
            return
        if lanes > self.max_batch:
            raise ValueError(
                f"flashmla: {lanes} lanes, and it was made for {self.max_batch}; "
                "raise max_requests"
            )
        if self.by_pages:
            result, log = self._attend_pages(q.contiguous(), k, tables)
        else:
            result, log = self._attend_listed(q, k, tables)
        self.finish(result, log, tables.lengths, out, lse)

    def finish(
        self, result: Tensor, log: Tensor, lengths: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        """Copy what the library returns, ``[lanes, 1, heads, 512]`` and fp32 ``[lanes, heads]``.

        Heads that it pads are left out, empty lanes are 0 and -inf.
        """
        lanes, _, heads, _ = out.shape
        kernels.finish_kernel[(lanes, triton.cdiv(heads, BLOCK_HEADS))](
            *(result, log, lengths, out, lse, heads),
            *(result.stride(0), result.stride(2), *log.stride()),
            *(out.stride(0), out.stride(2)),
            BLOCK_H=BLOCK_HEADS,
            DIM=LATENT,
            num_warps=4,
        )

    def _attend_pages(self, q: Tensor, k: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """Dense decode over ``[pages, 1, 64, 576]``; any number of heads, none are padded.

        The library schedules its splits by the values of ``lengths``. The holder is therefore
        empty in each call: the kernel that fills it runs, or is captured, with the call, and a
        replay schedules anew. Of an empty lane it loads the page in the first column and uses
        nothing of it; what it writes there, 0 and +inf, ``finish_kernel`` replaces.

        Returns:
            ``[lanes, 1, heads, 512]`` and fp32 ``[lanes, heads]``.
        """
        metadata = self.provider.new_metadata()
        result, log = self.provider.decode(
            *(q, k.transpose(1, 2), tables.table, tables.lengths, LATENT, metadata),
            softmax_scale=self.model.scale,
            is_fp8_kvcache=False,
            **self.provider.options,
        )
        return result, log[:, :, 0]

    def _attend_listed(self, q: Tensor, k: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """The sparse kernels over rows ``[slots, 1, unit, row]``, by the index of each token.

        Returns:
            ``[lanes, 1, heads, 512]`` and fp32 ``[lanes, heads]``, of padded heads.
        """
        lanes, heads = q.shape[0], q.shape[2]
        indices: Tensor = tables.attached
        if indices is None:
            table = tables.table
            indices = self._indices(lanes, table.shape[1] * k.shape[2])
            width = indices.shape[2]
            kernels.indices_kernel[(lanes, triton.cdiv(width, BLOCK))](
                *(table, tables.lengths, indices, width, table.stride(0), indices.stride(0)),
                UNIT=k.shape[2],
                BLOCK=BLOCK,
            )
        if heads != self.heads or not q.is_contiguous():
            self.queries[:lanes, :, :heads].copy_(q)
            q = self.queries[:lanes]
        rows = k.transpose(1, 2).reshape(-1, 1, k.shape[3])
        if self.fp8:
            result, log = self._decode(q, rows, indices)
            return result, log[:, :, 0]
        result, _, log = self.provider.sparse(
            q[:, 0], rows, indices, self.model.scale, **self.provider.options
        )
        return result[:, None], log

    def _indices(self, lanes: int, tokens: int) -> Tensor:
        """The library's indices, ``[lanes, 1, width]``, as wide as N tokens need."""
        width = -(-tokens // self.multiple) * self.multiple
        return self.indices[: lanes * width].view(lanes, 1, width)

    def _decode(self, q: Tensor, rows: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Sparse decode over fp8 rows ``[tokens, 1, 656]``; they are one page of any size.

        The scheduler's metadata depends on shapes alone, so one holder serves every layer and
        step of a batch size; one that is filled while a graph is captured belongs to the graph.
        """
        batch = q.shape[0]
        metadata = self._metadata.get(batch)
        if metadata is None:
            metadata = self.provider.new_metadata()
            if not torch.cuda.is_current_stream_capturing():
                self._metadata[batch] = metadata
        result, log = self.provider.decode(
            *(q, rows[None], None, None, LATENT, metadata),
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
        self.prefill_selected(q, k, v, q_start, k_start, None, out, lse)

    @hookimpl
    def prefill_selected(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_start: int,
        k_start: int,
        keep: Tensor | None,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """``keep`` is None where causality alone decides."""
        heads, scale = q.shape[1], self.model.scale
        columns = k_start + torch.arange(k.shape[0], device=q.device)
        for first in range(0, q.shape[0], PROMPT_ROWS):
            part = slice(first, first + PROMPT_ROWS)
            rows = q_start + first + torch.arange(len(q[part]), device=q.device)
            seen = columns[None] <= rows[:, None]
            if keep is not None:
                seen &= keep[part]
            indices = reference.listed(seen, SPARSE_MULTIPLE)[:, None]
            queries = torch.nn.functional.pad(q[part], (0, 0, 0, self.heads - heads))
            result, _, log = self.provider.sparse(
                queries.contiguous(), k.contiguous(), indices, scale, **self.provider.options
            )
            out[part], lse[part] = reference.finish(result, log, seen.sum(1), heads)
