"""The attention function that Transformers calls while a forward runs over a ``TopkvCache``.

An attention module hands its queries, and what the cache's ``update`` returned, to the function
that the config names. The cache itself is not handed on, so ``TopkvLayer.update`` marks the key
tensor with the layer, and the function finds the open forward through the mark.

The config names this function only while such a forward is open: every other forward runs
what the model ran before it was attached.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from topkv.errors import CapabilityError, RequestError

# "flash", "sdpa" or "flex_attention" in a name, or a slash, mean something to Transformers.
NAME = "topkv"
MARK = "_topkv_layer"

SHARED = "two threads run models that share one config object; give each model a config of its own"


class _NoBackward(torch.autograd.Function):
    """The identity forward, an error backward."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise CapabilityError(
            "attention through topkv has no backward",
            [
                "a gradient was asked for of a forward over a TopkvCache; use torch.no_grad() for "
                "inference, and to train another cache, or detach() the model first"
            ],
        )


def without_backward(out: Tensor, inputs: Iterable[Tensor]) -> Tensor:
    """``out``, made without a graph of its ``inputs``, such that a backward to them raises.

    Without it a backward would leave out all that goes through attention, and say nothing.
    """
    if not torch.is_grad_enabled():
        return out
    result: Tensor = _NoBackward.apply(out, *inputs)
    return result


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend over the host-resident history of a request.

    Args:
        module: the attention module; it knows nothing that is needed here.
        query: ``[B, H, q, D]`` post-RoPE.
        key, value: ``[B, Hkv, q, D]`` of the new tokens alone, the key marked by the cache.
        attention_mask: None; padding is known to the cache.

    Returns:
        ``[B, q, H, D]`` without a backward, and None for the weights.

    Raises:
        RequestError: the key comes from no ``TopkvCache``.
    """
    layer = getattr(key, MARK, None)
    if layer is None:
        raise RequestError(
            "attention was asked for keys that come from no TopkvCache while a topkv forward "
            f"is open: {SHARED}"
        )
    with torch.no_grad():
        out = layer.attention(query, key, value)
    return without_backward(out, (query, key, value)), None


def no_mask(*args: Any, **kwargs: Any) -> None:
    """Nothing is masked by a tensor: the core attends causally and rows are packed."""


def register() -> None:
    """Make the name known to Transformers. Idempotent."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, no_mask)
