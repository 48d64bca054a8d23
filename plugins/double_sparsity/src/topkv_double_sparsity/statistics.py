"""Importance of channels: statistics of post-RoPE queries and keys, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from topkv_double_sparsity.calibration import PROMPT_STATISTICS


class Moments:
    """Sums over tokens, added block by block; every block counts.

    Query heads are summed over the group of their kv-head. The variance of keys is merged by the
    formula of Chan, Golub and LeVeque, so that a large mean of a channel costs no digits.
    All tensors are float64 ``[Hkv, D]``.

    Args:
        kv_heads: Hkv.
        dim: D.
        device: of the activations.
    """

    def __init__(self, kv_heads: int, dim: int, device: torch.device | str = "cpu") -> None:
        def zeros() -> Tensor:
            return torch.zeros(kv_heads, dim, dtype=torch.float64, device=device)

        self.tokens = 0
        self.abs_q, self.abs_k, self.abs_qk = zeros(), zeros(), zeros()
        self.square_k, self.mean_k, self.spread_k = zeros(), zeros(), zeros()
        self.low_k, self.high_k = zeros() + torch.inf, zeros() - torch.inf

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
        self.abs_q += q.abs().sum((0, 2))
        self.abs_k += k.abs().sum(0)
        self.abs_qk += (q * k[:, :, None]).abs().sum((0, 2))
        self.square_k += k.square().sum(0)
        self.low_k = torch.minimum(self.low_k, k.amin(0))
        self.high_k = torch.maximum(self.high_k, k.amax(0))
        mean, new = k.mean(0), len(k)
        total = self.tokens + new
        shift = mean - self.mean_k
        self.spread_k += (k - mean).square().sum(0) + shift.square() * (self.tokens * new / total)
        self.mean_k += shift * (new / total)
        self.tokens = total

    def importance(self, statistic: str) -> Tensor:
        """Float64 ``[Hkv, D]``, at least 0; the larger the more important.

        One token alone has no variance and no span; its square and size stand in for them.
        """
        if statistic not in PROMPT_STATISTICS:
            raise ValueError(f"expected one of {PROMPT_STATISTICS}, got {statistic!r}")
        if self.tokens == 0:
            raise ValueError("no tokens were added; add at least one block")
        variance = (self.spread_k if self.tokens > 1 else self.square_k) / self.tokens
        span = self.high_k - self.low_k if self.tokens > 1 else self.abs_k
        return {
            "qk_span": self.abs_q / self.tokens * span,
            "qk": self.abs_qk / self.tokens,
            "q": self.abs_q / self.tokens,
            "k": self.abs_k / self.tokens,
            "k_var": variance,
        }[statistic]


def of_prompt(q: Tensor, k: Tensor, statistic: str, block: int = 4096) -> Tensor:
    """Importance ``[Hkv, D]`` from post-RoPE q ``[m, H, D]`` and k ``[m, Hkv, D]`` of a prompt."""
    moments = Moments(k.shape[1], k.shape[2], k.device)
    for start in range(0, len(k), block):
        moments.add(q[start : start + block], k[start : start + block])
    return moments.importance(statistic)


def of_weight(weight: Tensor, kv_heads: int) -> Tensor:
    """``k_weight``: importance ``[Hkv, D]`` from the weight ``[Hkv * D, hidden]`` of k_proj.

    The norm of the row that makes a channel: the standard deviation of that channel, before
    RoPE, over inputs that are white.
    """
    norms: Tensor = torch.linalg.vector_norm(weight.double(), dim=1)
    return norms.view(kv_heads, -1)
