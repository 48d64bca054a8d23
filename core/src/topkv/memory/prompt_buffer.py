"""The prompt buffer: first tokens of one prompt, which stay on the device while it is read."""

from __future__ import annotations

import torch
from torch import Tensor

from topkv.config import LoweredConfig
from topkv.types import GroupShape


def token_bytes(group: GroupShape) -> int:
    """Bytes of a token in a layer of a group, as the device has it."""
    return group.entry_bytes * group.lane_heads // group.unit


def token_rows(memory: Tensor, group: GroupShape) -> Tensor:
    """Rows ``[planes, n, Hkv, D]`` as stored, in memory of n tokens, a multiple of 16."""
    return memory.view(group.dtype).view(group.planes, -1, group.num_kv_heads, group.head_dim)


def prompt_buffer(config: LoweredConfig, group: GroupShape, device: torch.device) -> Tensor:
    """Allocate the prompt buffer of a layer, rows as of ``token_rows``."""
    tokens = min(config.prefill_buffer_tokens or 0, config.max_request_tokens)
    tokens = -(-tokens // 16) * 16  # planes begin on a multiple of 16 bytes
    memory = torch.empty(tokens * token_bytes(group), dtype=torch.uint8, device=device)
    return token_rows(memory.fill_(255) if config.poison else memory, group)
