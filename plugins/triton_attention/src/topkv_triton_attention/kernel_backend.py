"""The backend on Triton kernels."""

from __future__ import annotations

from typing import Any

import torch

from topkv.hooks.backend import BackendSetup
from topkv_triton_attention.backend import Calls, TritonAttention, is_latent, skip_factor
from topkv_triton_attention.launch import INTERPRETED, Decoder, SkippingDecoder
from topkv_triton_attention.mla_launch import LatentDecoder
from topkv_triton_attention.mla_reference import LatentShape
from topkv_triton_attention.prefill_launch import Prefiller


class TritonAttentionKernels(TritonAttention):
    """``TritonAttention`` by kernels; on a CPU in Triton's interpreter alone."""

    impl = "triton"

    def _refusals(self, setup: BackendSetup) -> list[str]:
        return super()._refusals(setup) + _device_refusals(setup.device)

    def _made(self, setup: BackendSetup) -> Calls:
        model, most, device = setup.model, setup.max_batch, setup.device
        heads = setup.group.num_kv_heads * setup.group_size
        latent = is_latent(model)
        prefill = Prefiller(model.scale, latent, model.softcap).prefill
        if latent:
            shape = LatentShape.of(model, setup.group)
            rows = LatentDecoder(
                *(most, heads, shape, model.dtype, model.scale, device),
                max_queries=setup.max_queries,
            )
            return rows.attend, prefill
        sizes = (most, heads, setup.group_size, model.head_dim, model.scale, device)
        more: dict[str, Any] = {"softcap": model.softcap, "max_queries": setup.max_queries}
        factor = skip_factor(setup)
        if factor is None:
            return Decoder(*sizes, **more).attend, prefill
        return SkippingDecoder(*sizes, factor=factor, **more).attend, prefill


def _device_refusals(device: torch.device) -> list[str]:
    if device.type == "cuda" or INTERPRETED:
        return []
    return [
        f"device: impl 'triton' needs CUDA, got {device}; use impl 'reference', or set "
        "TRITON_INTERPRET=1 before triton is imported to run the kernels in its interpreter"
    ]
