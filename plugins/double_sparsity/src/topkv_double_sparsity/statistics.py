"""Importance of channels, ``E|q| (max k - min k)`` of post-RoPE queries and keys, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


class Moments:
    """Sums and ranges over tokens, added block by block; every block counts.

    Query heads are summed over the group of their kv-head. All tensors are float64 ``[Hkv, D]``.

    Args:
        kv_heads: Hkv.
        dim: D.
        device: of the activations.
    """

    def __init__(self, kv_heads: int, dim: int, device: torch.device | str = "cpu") -> None:
        zeros = torch.zeros(kv_heads, dim, dtype=torch.float64, device=device)
        self.tokens = 0
        self.abs_q, self.low_k, self.high_k = zeros, zeros + torch.inf, zeros - torch.inf

    def add(self, q: Tensor, k: Tensor) -> None:
        """Add the tokens of a block.

        Args:
            q: ``[m, H, D]`` post-RoPE queries.
            k: ``[m, Hkv, D]`` post-RoPE keys of the same tokens.
        """
        if len(q) != len(k):
            raise ValueError(
                f"queries and keys must be of the same tokens, got {len(q)}, {len(k)}"
            )
        if len(k) == 0:
            return
        q, k = q.double().unflatten(1, (k.shape[1], -1)), k.double()
        self.abs_q = self.abs_q + q.abs().sum((0, 2))
        self.low_k = torch.minimum(self.low_k, k.amin(0))
        self.high_k = torch.maximum(self.high_k, k.amax(0))
        self.tokens += len(k)

    def importance(self) -> Tensor:
        """Float64 ``[Hkv, D]``, at least 0; the larger the more important.

        One token alone has no span; its size stands in for that.
        """
        if self.tokens == 0:
            raise ValueError("no tokens were added; add at least one block")
        span = self.high_k - self.low_k if self.tokens > 1 else self.high_k.abs()
        return self.abs_q / self.tokens * span


def of_prompt(q: Tensor, k: Tensor, block: int = 4096) -> Tensor:
    """Importance ``[Hkv, D]`` from post-RoPE q ``[m, H, D]`` and k ``[m, Hkv, D]`` of a prompt."""
    moments = Moments(k.shape[1], k.shape[2], k.device)
    for start in range(0, len(k), block):
        moments.add(q[start : start + block], k[start : start + block])
    return moments.importance()
