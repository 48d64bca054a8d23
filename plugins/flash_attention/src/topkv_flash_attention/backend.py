"""The backend: FlashAttention's kernels in place over units that are scattered in a buffer.

A unit is a page of the library, and a lane a sequence of Q queries: where each kv-head selects for
itself it has lanes of its own, so page tables need nothing further. A step is one call of the
library, which writes the output where the caller wants it, and one small kernel behind it. Only
where a row has several lanes, and several queries or heads that are further apart than others, no
view shows rows as lanes: queries are then copied first, and outputs by the kernel behind.

Scheduler metadata (how many parts each sequence is cut into) depends on the lengths, and each
layer selects for itself; no hook says when lengths are those of the layer before. So it is left
to the library, which makes it on the device in front of its own kernel in each call.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from topkv import hookimpl
from topkv.errors import CapabilityError
from topkv.hooks.backend import BackendSetup
from topkv.types import LayerView, Plan, Tables
from topkv_authoring.page_table import adapt_page_table
from topkv_flash_attention import kernels, providers, reference
from topkv_flash_attention.hopper import LATENT, Counts, Query

BLOCK_HEADS = 8
"""Heads of a program of the kernel that follows the library's."""

ACCUMULATORS = 256 << 20
"""Most bytes of partial outputs that a call of the library may ask for."""
MOST_SPLITS, LEAST_TOKENS = 128, 64
"""Parts that the library makes at most, and tokens of its smallest block."""

PROMPT_ROWS = 512
"""Rows of a prompt that attend to selections at once."""


class FlashAttention:
    """Attention by the first library of ``providers`` that serves one group of layers.

    Args:
        setup: heads of up to 256 elements, or latent rows of 512 + 64; on a CUDA device.

    Raises:
        CapabilityError: with every reason, and with what was tried where no library serves.
    """

    def __init__(self, setup: BackendSetup) -> None:
        model, group, device = setup.model, setup.group, setup.device
        cuda = device.type == "cuda"
        capability = torch.cuda.get_device_capability(device) if cuda else None
        self.library = providers.BUILDS.require(
            f"flash_attention cannot serve layers {list(group.layers)}",
            _refusals(setup),
            lambda library: library.refusals(model, group, capability),
        )
        self.model, self.group = model, group
        self.latent = model.attention == "mla"
        self.logits = (model.scale, model.softcap or 0.0)
        lanes, most = setup.max_batch * group.lane_heads, setup.max_queries
        self.zeros = torch.zeros(lanes, dtype=torch.int32, device=device)
        self.queries = torch.zeros_like(self.zeros)
        self.starts = torch.arange(lanes + 1, dtype=torch.int32, device=device) * torch.arange(
            most + 1, dtype=torch.int32, device=device
        ).unsqueeze(1)

    @hookimpl
    def adapt_page_table(self, layer: LayerView, plan: Plan, tables: Tables) -> None:
        """See ``topkv.hooks.backend.Backend.adapt_page_table``."""
        adapt_page_table(layer, plan, tables, impl="triton")

    @hookimpl
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, out: Tensor, lse: Tensor
    ) -> None:
        """See ``topkv.hooks.backend.Backend.attend``.

        Copies queries and outputs where no view shows rows as lanes.

        Raises:
            CapabilityError: more queries of a row than ``max_queries`` allows.
            ValueError: more lanes than ``max_batch`` allows.
        """
        lanes = len(tables.table)
        if q.shape[1] >= len(self.starts):
            raise CapabilityError(
                f"flash_attention: attend was made for {len(self.starts) - 1} queries a row",
                [f"got q {list(q.shape)}, [B, Q, H, D]; raise max_queries when you make it"],
            )
        if lanes > len(self.zeros):
            raise ValueError(
                f"flash_attention: {lanes} lanes, and {len(self.zeros)} were announced; "
                "raise max_requests"
            )
        if lanes:
            self._attend(q, k, v, tables, self.zeros[:lanes], out, lse)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tables: Tables,
        zeros: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        table, lengths = tables.table, tables.lengths
        lanes, dim = len(table), out.shape[-1]
        each, queries = lanes // len(out), out.shape[1]
        heads = out.shape[2] // each
        splits = _most_splits(out.numel(), table.shape[1] * k.shape[2])
        counts = None if tables.queries is None else self._counts(tables.queries, queries, each)
        query, keys, values = self.parts(_by_lane(q, each), k, v)
        shape = (lanes, queries, heads, dim)
        if counts is None:
            apart = each > 1 and not out.is_contiguous()
        else:
            apart = each > 1 or out.stride(0) != queries * out.stride(1)
        target = out.new_empty(shape) if apart else out.view(shape)
        result, log = self.library.attend(
            *(query, keys, values, table, lengths, *self.logits, splits, zeros, target, counts)
        )
        several: dict[str, Any] = {} if counts is None else {
            "QUERIES": queries, "p_queries": tables.queries, "s_from_query": result.stride(1),
            "s_from_lse_query": log.stride(1), "s_out_query": out.stride(1),
            "s_lse_query": lse.stride(1),
        }  # fmt: skip
        kernels.finish_kernel[(lanes * queries, triton.cdiv(heads, BLOCK_HEADS))](
            *(result, log, lengths, out, lse, heads),
            *(result.stride(0), result.stride(2), log.stride(0), log.stride(2)),
            *(out.stride(0), out.stride(2), lse.stride(0), lse.stride(2)),
            COPY=result.data_ptr() != out.data_ptr(),
            LANES=each,
            DIM=dim,
            BLOCK_D=triton.next_power_of_2(dim),
            BLOCK_H=BLOCK_HEADS,
            num_warps=4,
            **several,
        )

    def _counts(self, queries: Tensor, most: int, each: int) -> Counts:
        """Queries of each lane, of rows with ``most`` of them and ``each`` lanes."""
        lanes = len(queries) * each
        if each > 1:  # the library takes adjacent ones alone
            self.queries[:lanes].view(-1, each).copy_(queries[:, None])
            queries = self.queries[:lanes]
        return Counts(queries, self.starts[most, : lanes + 1])

    def parts(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Query, Tensor, Tensor]:
        """Latent rows are ``[latent | rope]``: the latent part is their value and meets q too."""
        if not self.latent:
            return Query(q), k, v
        return Query(q[..., LATENT:], q[..., :LATENT]), k[..., LATENT:], k[..., :LATENT]

    @hookimpl
    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, q_start: int, k_start: int, out: Tensor, lse: Tensor
    ) -> None:
        q, k, v = (reference.aligned(each) for each in (q, k, v))
        spans = reference.spans(len(q), len(k), q_start - k_start)
        if sum(rows.stop - rows.start for rows, _, _ in spans) < len(q):  # some see nothing
            out.zero_()
            lse.fill_(-torch.inf)
        for rows, keys, causal in spans:
            pieces = self.parts(q[rows], k[:keys], v[:keys])
            direct = out[rows] if out.dtype is q.dtype else None
            result, log = self.library.chunk(*pieces, *self.logits, causal, direct)
            if direct is None:
                out[rows] = result
            lse[rows] = log

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
        """Rows are lanes whose pages are single tokens."""
        if not len(k):
            out.zero_()
            lse.fill_(-torch.inf)
            return
        q, k, v = (reference.aligned(each) for each in (q, k, v))
        last = q_start - k_start + torch.arange(len(q), device=q.device)[:, None]
        ids = torch.where(ids <= last, ids, -1)
        for first in range(0, len(q), PROMPT_ROWS):
            part = slice(first, first + PROMPT_ROWS)
            table, lengths = reference.listed(ids[part])
            result = torch.empty_like(out[part], dtype=q.dtype)[:, None]
            self._attend(
                *(q[part][:, None], k.unsqueeze(2), v.unsqueeze(2), Tables(table, lengths)),
                *(torch.zeros_like(lengths), result, lse[part][:, None]),
            )
            out[part] = result[:, 0]


def _by_lane(q: Tensor, each: int) -> Tensor:
    """Queries ``[B, Q, H, D]`` as ``[N, Q, heads, D]``, in tokens of one stride if Q is not 1."""
    rows, queries, heads, dim = q.shape
    if queries == 1:
        return q.reshape(rows * each, 1, heads // each, dim)
    if each > 1:
        q = q.unflatten(2, (each, -1)).transpose(1, 2).flatten(0, 1)
    return q.reshape(-1, *q.shape[2:]).unflatten(0, (-1, queries))


def _most_splits(outputs: int, tokens: int) -> int:
    """Bound of the parts of a sequence; 0, the library's own choice, unless that costs too much.

    The library sizes its partial outputs (fp32) by what one long sequence would want.

    Args:
        outputs: elements of the output.
        tokens: columns of the table, in tokens.
    """
    most = ACCUMULATORS // (4 * outputs)
    return 0 if most >= min(MOST_SPLITS, -(-tokens // LEAST_TOKENS)) else max(1, most)


def _refusals(setup: BackendSetup) -> list[str]:
    model, group = setup.model, setup.group
    reasons = []
    if setup.device.type != "cuda":
        reasons.append(f"it needs a CUDA device, got {setup.device}; use another backend")
    if model.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"it takes float16 or bfloat16, got {model.dtype}; load the model in one")
    if group.dtype is not model.dtype:
        reasons.append(
            f"it reads rows in the dtype of the model, {model.dtype}, got {group.dtype}; set "
            "kv_format to model"
        )
    if model.attention == "mla" and model.softcap is not None:
        reasons.append("it does not cap logits of latent attention; use triton_attention")
    if group.residency == "streamed":
        reasons.append("it reads no host memory: make streamed layers resident")
    if group.max_lanes * group.slots >= 2**31:
        reasons.append(
            f"buffer: {group.max_lanes} lanes x {group.slots} slots exceed the int32 ids of a "
            "page table; lower max_requests or buffer"
        )
    return reasons
