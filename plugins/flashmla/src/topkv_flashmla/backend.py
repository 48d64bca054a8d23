"""The backend: latent attention by FlashMLA's kernels, in place over the rows of a buffer.

Decode over fp8 rows is the library's sparse decode, over bfloat16 rows its sparse prefill kernel
with one query a lane. Prompts go through that kernel too: a causal chunk is a selection as well.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from topkv import hookimpl
from topkv.errors import CapabilityError
from topkv.ops.page_table import adapt_page_table
from topkv.types import GroupShape, LayerView, ModelShape, Plan
from topkv_flashmla import kernels, providers, reference

LATENT, DIM = 512, 576
DECODE_MULTIPLE, SPARSE_MULTIPLE = 64, 128
"""Widths of indices that the two kernels take are multiples of these."""

BLOCK, BLOCK_HEADS = 1024, 8
"""Columns of indices, and heads of an output, of a program."""

PROMPT_ROWS = 2048
"""Rows of a prompt that are attended at once."""


class FlashMLA:
    """Attention over latent rows that lie scattered in a buffer, for one group of layers.

    Args:
        model: geometry; latent attention with rows of 512 + 64 elements, at most 128 heads.
        group: the layers that this instance serves.
        impl: ``"triton"``, for what goes on around the library's kernels.
        device: a CUDA device of capability 9.0.
        max_batch: most decode rows of one forward.

    Raises:
        CapabilityError: with every reason, a missing library among them.
    """

    def __init__(
        self,
        model: ModelShape,
        group: GroupShape,
        impl: str,
        device: torch.device,
        max_batch: int,
    ) -> None:
        reasons = _refusals(model, group, impl, device)
        provider, tried = providers.find()
        if provider is None:
            reasons.append(
                "no build of FlashMLA is usable: pip install sgl-flash-mla, say; "
                + "; ".join(tried)
            )
        if reasons or provider is None:
            raise CapabilityError(f"flashmla cannot serve layers {list(group.layers)}", reasons)
        self.model, self.group, self.provider = model, group, provider
        self.fp8 = group.dtype is torch.uint8
        self.heads = 64 if model.num_heads <= 64 else 128
        sparse = group.residency == "sparse"
        tokens = (group.select + 1) * group.unit if sparse else group.max_units * group.unit
        self.multiple = DECODE_MULTIPLE if self.fp8 else SPARSE_MULTIPLE
        most = -(-tokens // self.multiple) * self.multiple
        self.indices = torch.full((max_batch * most,), -1, dtype=torch.int32, device=device)
        self.max_batch = max_batch
        self.queries = torch.zeros(
            (max_batch, 1, self.heads, DIM), dtype=model.dtype, device=device
        )
        self._metadata: dict[int, Any] = {}

    @hookimpl
    def adapt_page_table(
        self, layer: LayerView, plan: Plan, table: Tensor, lengths: Tensor
    ) -> None:
        adapt_page_table(layer, plan, table, lengths, impl="triton")

    @hookimpl
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table: Tensor,
        lengths: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """See ``topkv.hooks.backend.attend``.

        Raises:
            ValueError: more lanes than ``max_batch`` allows.
        """
        lanes, heads = q.shape[0], q.shape[2]
        if not lanes:
            return
        if lanes > self.max_batch:
            raise ValueError(
                f"flashmla: {lanes} lanes, and the workspace holds {self.max_batch}; "
                "raise max_requests"
            )
        width = -(-table.shape[1] * k.shape[2] // self.multiple) * self.multiple
        indices = self.indices[: lanes * width].view(lanes, 1, width)
        kernels.indices_kernel[(lanes, triton.cdiv(width, BLOCK))](
            *(table, lengths, indices, width, table.stride(0), indices.stride(0)),
            UNIT=k.shape[2],
            BLOCK=BLOCK,
        )
        if heads != self.heads:
            self.queries[:lanes, :, :heads].copy_(q)
            q = self.queries[:lanes]
        rows = k.transpose(1, 2).reshape(-1, 1, k.shape[3])
        if self.fp8:
            result, log = self._decode(q, rows, indices)
            log = log[:, :, 0]
        else:
            result, _, log = self.provider.sparse(
                q[:, 0], rows, indices, self.model.scale, **self.provider.options
            )
            result = result[:, None]
        kernels.finish_kernel[(lanes, triton.cdiv(heads, BLOCK_HEADS))](
            *(result, log, lengths, out, lse, heads),
            *(result.stride(0), result.stride(2), *log.stride()[:2]),
            *(out.stride(0), out.stride(2)),
            BLOCK_H=BLOCK_HEADS,
            DIM=LATENT,
            num_warps=4,
        )

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
        self._prompt(q, k, q_start, k_start, None, out, lse)

    @hookimpl
    def prefill_selected(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_start: int,
        k_start: int,
        keep: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        self._prompt(q, k, q_start, k_start, keep, out, lse)

    def _prompt(
        self,
        q: Tensor,
        k: Tensor,
        q_start: int,
        k_start: int,
        keep: Tensor | None,
        out: Tensor,
        lse: Tensor,
    ) -> None:
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


def _refusals(model: ModelShape, group: GroupShape, impl: str, device: torch.device) -> list[str]:
    reasons = []
    if (model.attention, model.head_dim, model.out_dim) != ("mla", DIM, LATENT):
        reasons.append(
            f"it takes latent attention with rows of 512 + 64 elements, got {model.attention} "
            f"with head_dim {model.head_dim} and values of {model.out_dim}; use another backend"
        )
    if model.num_heads > 128:
        reasons.append(f"it takes at most 128 query heads, got {model.num_heads}")
    if model.dtype is not torch.bfloat16:
        reasons.append(f"it takes bfloat16 queries, got {model.dtype}; load the model in that")
    if impl != "triton":
        reasons.append(f"impl must be 'triton', got {impl!r}: the library has no reference")
    device = torch.device(device)
    if device.type != "cuda":
        reasons.append(f"it needs a CUDA device, got {device}; use another backend")
    elif torch.cuda.get_device_capability(device)[0] != 9:
        reasons.append(
            "its kernels of latent rows are for Hopper, got capability "
            f"{torch.cuda.get_device_capability(device)}; use another backend"
        )
    if group.rows * group.slots * group.unit >= 2**31:
        reasons.append(
            f"buffer: {group.rows} rows x {group.slots} slots x {group.unit} tokens exceed the "
            "library's int32 indices; lower max_requests or buffer"
        )
    if group.lane_heads != 1:
        reasons.append(f"all heads share a selection, got {group.lane_heads} lanes a request")
    return reasons
