"""The backend: FlashInfer's kernels over page tables, in place over the rows of a buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from topkv import hookimpl
from topkv.hooks.backend import BackendSetup
from topkv.ops.chunk_attention import kept
from topkv.types import GroupShape, LayerView, ModelShape, Plan, Tables
from topkv_flashinfer import plans, providers
from topkv_flashinfer.decode import Decode
from topkv_flashinfer.latent import LATENT, ROPE, Latent
from topkv_flashinfer.prompts import LatentPrompts, Prompts

HEAD_DIMS = (64, 128, 256)


class FlashInfer:
    """Attention by FlashInfer, for one group of layers.

    Making one compiles the library's kernels where they are not compiled yet, which takes minutes.

    Args:
        setup: grouped queries with a head dim of ``HEAD_DIMS``, or latent attention with rows of
            512 + 64 elements; on a CUDA device of capability 8.0 or more, of 9.0 for latent
            attention.

    Raises:
        CapabilityError: with every reason, a missing library among them.
    """

    def __init__(self, setup: BackendSetup) -> None:
        self.latent = setup.model.attention == "mla"
        part = providers.PARTS["mla" if self.latent else "gqa"]
        what = f"flashinfer cannot serve layers {list(setup.group.layers)}"
        self._serve(part.require(what, _refusals(setup)), setup)

    def _serve(self, library: providers.Library, setup: BackendSetup) -> None:
        """Make the plans and workspaces."""
        prompts: LatentPrompts | Prompts
        self.library = library
        self.lanes = setup.max_batch * setup.group.lane_heads * setup.max_queries
        if self.latent:
            self._latent = Latent(library, setup)
            scratch = self._latent.float
            prompts = LatentPrompts(library, setup.model, setup.device, scratch)
        else:
            self._decode = Decode(library, setup)
            prompts = Prompts(library, setup.model)
        self._prompts = prompts

    @hookimpl
    def adapt_page_table(self, layer: LayerView, plan: Plan, tables: Tables) -> None:
        """See ``topkv.hooks.backend.Backend.adapt_page_table``."""
        part = self._latent if self.latent else self._decode
        part.pages.adapt(layer, plan, tables)

    @hookimpl
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, out: Tensor, lse: Tensor
    ) -> None:
        """See ``topkv.hooks.backend.Backend.attend``.

        Copies queries where a row has several lanes and rows are apart.

        Raises:
            ValueError: more lanes than ``max_batch`` and ``max_queries`` allow, or ``lse`` is not
                contiguous.
            RuntimeError: a graph is being captured before this batch size has run.
        """
        lanes = len(tables.table) * q.shape[1]
        if not lanes:
            return
        if lanes > self.lanes:
            raise ValueError(
                f"flashinfer: {lanes} lanes, and the workspace holds {self.lanes}; "
                "raise max_requests or max_queries"
            )
        if not lse.is_contiguous():
            raise ValueError(f"flashinfer: lse must be contiguous, got strides {lse.stride()}")
        if self.latent:
            self._latent.attend(q, k, tables, out, lse)
        else:
            self._decode.attend(q, k, v, tables, out, lse)

    @hookimpl
    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, q_start: int, k_start: int, out: Tensor, lse: Tensor
    ) -> None:
        """See ``topkv.hooks.backend.Backend.prefill``."""
        self._prompts(q, k, v, q_start, k_start, None, out, lse)

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
        """See ``topkv.hooks.backend.Backend.prefill_selected``."""
        self._prompts(q, k, v, q_start, k_start, kept(ids, len(k)), out, lse)


def _refusals(setup: BackendSetup) -> list[str]:
    model, group, max_batch = setup.model, setup.group, setup.max_batch
    latent = model.attention == "mla"
    reasons = _latent_refusals(model, group) if latent else _head_refusals(model)
    if latent and model.softcap is not None:
        reasons.append("softcap: it does not cap logits of latent attention; use triton_attention")
    if model.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(
            f"dtype: expected float16 or bfloat16, got {model.dtype}; load the model in one of "
            "those"
        )
    if group.dtype is not model.dtype:
        reasons.append(
            f"kv_format: it reads rows of the model's dtype {model.dtype}, got {group.dtype}; set "
            "kv_format to 'model'"
        )
    if setup.device.type != "cuda":
        reasons.append(f"it needs a CUDA device, got {setup.device}; use another backend")
    else:
        major = torch.cuda.get_device_capability(setup.device)[0]
        if major != 9 if latent else major < 8:
            needed = "9.x for latent attention" if latent else "8.0 or more"
            reasons.append(f"capability: expected {needed}, got {major}.x; use another backend")
    if max_batch < 1:
        reasons.append(f"max_batch: expected at least 1, got {max_batch}; raise it")
    if group.max_lanes * group.slots >= 2**31:
        reasons.append(
            f"buffer: {group.max_lanes} lanes x {group.slots} slots exceed the int32 ids of a "
            "page table; lower max_requests or buffer"
        )
    lanes = max_batch * group.lane_heads * setup.max_queries
    tokens = lanes * plans.table_width(group, setup.max_queries) * group.unit
    if tokens >= 2**31:
        reasons.append(
            f"page tables: {tokens} tokens in a batch exceed the library's 32-bit positions; "
            "lower max_requests, max_queries or select"
        )
    return reasons


def _head_refusals(model: ModelShape) -> list[str]:
    if model.head_dim in HEAD_DIMS:
        return []
    return [f"head dim: expected one of {HEAD_DIMS}, got {model.head_dim}; use another backend"]


def _latent_refusals(model: ModelShape, group: GroupShape) -> list[str]:
    reasons = []
    if (model.head_dim, model.out_dim) != (LATENT + ROPE, LATENT):
        reasons.append(
            f"it takes latent rows of {LATENT} + {ROPE} elements, got head_dim {model.head_dim} "
            f"and values of {model.out_dim}; use another backend"
        )
    if group.lane_heads != 1:
        reasons.append(f"all heads share a selection, got {group.lane_heads} lanes a request")
    return reasons
