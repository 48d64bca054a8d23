"""Instances by shapes, as ``topkv.hooks.backend.BackendSetup`` brings them."""

from __future__ import annotations

import torch

from topkv.hooks.backend import BackendSetup
from topkv.types import GroupShape, ModelShape
from topkv_triton_attention.backend import TritonAttention


def made(
    model: ModelShape,
    group: GroupShape,
    impl: str,
    device: torch.device,
    max_batch: int,
    max_queries: int = 1,
) -> TritonAttention:
    """The backend of an implementation, for the query heads of the model."""
    sizes = (torch.device(device), max_batch, model.group_size)
    setup = BackendSetup(model, group, *sizes, max_queries=max_queries)
    if impl == "reference":
        return TritonAttention(setup)
    from topkv_triton_attention.kernel_backend import TritonAttentionKernels

    return TritonAttentionKernels(setup)
