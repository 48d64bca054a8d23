"""Shapes and devices that the library's kernels take."""

from __future__ import annotations

import torch

from topkv.hooks.backend import BackendSetup
from topkv.types import GroupShape

LATENT, DIM = 512, 576
PAGE = 64
"""Tokens of a page in the library's dense decode; it takes no other."""


def attends_by_pages(group: GroupShape) -> bool:
    """Return True if the library's dense decode serves a group.

    Such a group has resident pages of 64 bfloat16 rows. Every build with kernels for Hopper has
    this decode, so no build is asked: DeepSeek dropped both in September 2026, and
    ``sgl-flash-mla`` keeps both behind one switch.
    """
    return (group.residency, group.dtype, group.unit) == ("resident", torch.bfloat16, PAGE)


def refusals(setup: BackendSetup) -> list[str]:
    """Return every reason why the library cannot serve a group, be it installed or not."""
    model, group, device = setup.model, setup.group, setup.device
    reasons = []
    if (model.attention, model.head_dim, model.out_dim) != ("mla", DIM, LATENT):
        reasons.append(
            f"it takes latent attention with rows of 512 + 64 elements, got {model.attention} "
            f"with head_dim {model.head_dim} and values of {model.out_dim}; use another backend"
        )
    if setup.group_size > 128:
        reasons.append(f"it takes at most 128 query heads, got {setup.group_size}")
    if model.dtype is not torch.bfloat16:
        reasons.append(f"it takes bfloat16 queries, got {model.dtype}; load the model in that")
    if device.type != "cuda":
        reasons.append(f"it needs a CUDA device, got {device}; use another backend")
    elif torch.cuda.get_device_capability(device)[0] != 9:
        reasons.append(
            "its kernels of latent rows are for Hopper, got capability "
            f"{torch.cuda.get_device_capability(device)}; use another backend"
        )
    if group.max_lanes * group.slots * group.unit >= 2**31:
        reasons.append(
            f"buffer: {group.max_lanes} lanes x {group.slots} slots x {group.unit} tokens exceed "
            "the library's int32 indices; lower max_requests or buffer"
        )
    if group.lane_heads != 1:
        reasons.append(f"all heads share a selection, got {group.lane_heads} lanes a request")
    return reasons
