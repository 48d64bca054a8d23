"""The backend: checks once what it was made for, then hands every call to one implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from topkv import hookimpl
from topkv.entries import IMPLS
from topkv.errors import CapabilityError
from topkv.ops.page_table import adapt_page_table
from topkv.types import GroupShape, LayerView, ModelShape, Plan
from topkv_triton_attention import mla_reference, reference
from topkv_triton_attention.mla_reference import latent_refusals

HEAD_DIMS = (64, 96, 128, 256)
"""Of grouped-query attention, as is ``MAX_GROUP``; for latent rows see ``mla_reference``."""
MAX_GROUP = 16
MAX_UNIT = 128


class TritonAttention:
    """Attention over units that lie scattered in a buffer, for one group of layers.

    Args:
        model: geometry of the attention layers, grouped-query or latent.
        group: the layers that this instance serves.
        impl: ``"reference"`` (torch) or ``"triton"``; chosen here, never switched later.
        device: where the step tensors live.
        max_batch: most decode rows of one forward; the workspaces are made for
            ``max_batch * group.lane_heads`` lanes.

    Raises:
        CapabilityError: with every reason why this model, group or device cannot be served.
    """

    def __init__(
        self,
        model: ModelShape,
        group: GroupShape,
        impl: str,
        device: torch.device,
        max_batch: int,
    ) -> None:
        device = torch.device(device)
        reasons = _refusals(model, group, impl, max_batch)
        if impl == "triton":
            reasons += _device_refusals(device)
        if reasons:
            raise CapabilityError(
                f"triton_attention cannot serve layers {list(group.layers)}", reasons
            )
        self.model = model
        self.group = group
        self.impl = impl
        self.device = device
        if impl == "triton":
            self._use_kernels(max_batch * group.lane_heads)
        else:
            self._use_reference(max_batch * group.lane_heads)

    def _use_kernels(self, lanes: int) -> None:
        from topkv_triton_attention import launch, mla_launch, prefill_launch

        model, group, device = self.model, self.group, self.device
        heads, scale, latent = model.num_heads // group.lane_heads, model.scale, _latent(model)
        decoder: launch.Decoder | mla_launch.LatentDecoder
        if latent:
            shape = mla_reference.LatentShape.of(model, group)
            decoder = mla_launch.LatentDecoder(lanes, heads, shape, model.dtype, scale, device)
        else:
            decoder = launch.Decoder(lanes, heads, model.group_size, model.head_dim, scale, device)
        self._attend = decoder.attend
        self._prefill = prefill_launch.Prefiller(scale, latent).prefill

    def _use_reference(self, lanes: int) -> None:
        model = self.model
        if _latent(model):
            shape = mla_reference.LatentShape.of(model, self.group)
            self._attend = mla_reference.Attend(shape, model.scale, lanes)
        else:
            self._attend = reference.Attend(model.scale, lanes)
        self._prefill = reference.Prefill(model.scale)

    @hookimpl
    def adapt_page_table(
        self, layer: LayerView, plan: Plan, table: Tensor, lengths: Tensor
    ) -> None:
        """See ``topkv.hooks.backend.adapt_page_table``."""
        adapt_page_table(layer, plan, table, lengths, self.impl)

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
            CapabilityError: q holds more than one query per lane, or its dtype is not that
                of k and v.
            ValueError: more lanes than ``max_batch`` allows.
        """
        self._attend(q, k, v, table, lengths, out, lse)

    @hookimpl
    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_start: int,
        k_start: int,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """See ``topkv.hooks.backend.prefill``."""
        self._prefill(q, k, v, q_start, k_start, out, lse)

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
        """See ``topkv.hooks.backend.prefill_selected``."""
        self._prefill(q, k, v, q_start, k_start, out, lse, keep)


def _latent(model: ModelShape) -> bool:
    return model.attention == "mla"


def _refusals(model: ModelShape, group: GroupShape, impl: str, max_batch: int) -> list[str]:
    reasons = []
    if impl not in IMPLS:
        reasons.append(f"impl: expected one of {IMPLS}, got {impl!r}; set it to one of those")
    reasons += latent_refusals(model, group) if _latent(model) else _head_refusals(model)
    if model.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        reasons.append(
            f"dtype: expected float16, bfloat16 or float32, got {model.dtype}; "
            "load the model in one of those"
        )
    if not 1 <= group.unit <= MAX_UNIT or group.unit & (group.unit - 1):
        reasons.append(
            f"unit: expected a power of two up to {MAX_UNIT}, got {group.unit}; "
            "set unit (or, for dense layers, page_tokens) to one"
        )
    if group.rows * group.slots >= 2**31:
        reasons.append(
            f"buffer: {group.rows} rows x {group.slots} slots exceed the int32 ids of a page "
            "table; lower max_requests or buffer"
        )
    if max_batch < 1:
        reasons.append(f"max_batch: expected at least 1, got {max_batch}; raise it")
    return reasons


def _head_refusals(model: ModelShape) -> list[str]:
    reasons = []
    if model.head_dim not in HEAD_DIMS:
        reasons.append(
            f"head dim: expected one of {HEAD_DIMS}, got {model.head_dim}; use another backend"
        )
    if not 1 <= model.group_size <= MAX_GROUP:
        reasons.append(
            f"query heads per kv-head: expected 1 to {MAX_GROUP}, got {model.group_size}; "
            "use another backend"
        )
    return reasons


def _device_refusals(device: torch.device) -> list[str]:
    from topkv_triton_attention.launch import INTERPRETED

    if device.type == "cuda" or INTERPRETED:
        return []
    return [
        f"device: impl 'triton' needs CUDA, got {device}; use impl 'reference', or set "
        "TRITON_INTERPRET=1 before triton is imported to run the kernels in its interpreter"
    ]
