"""The attention function that Transformers calls while a forward runs over a ``TopkvCache``.

An attention module hands its queries, and what the cache's ``update`` returned, to the function
that the config names. The cache itself is not handed on, so ``TopkvLayer.update`` marks the key
tensor with the open forward and the layer, and the function reads the mark.

The config names this function only while such a forward is open: every other forward runs
what the model ran before it was attached.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from topkv.errors import CapabilityError, RequestError
from topkv.types import Index
from topkv_transformers.forwards import Forward
from topkv_transformers.stock import covering_window

# "flash", "sdpa" or "flex_attention" in a name, or a slash, mean something to Transformers.
NAME = "topkv"
MARK = "_topkv_mark"
"""Attribute of a key tensor: ``(Forward, number of the layer)``."""

SINKS = "s_aux"
"""The argument with a logit for each head that takes part in its softmax, and has no value."""

PROJECTED = "block_indices"
"""The argument with the result of ``blocks.project``, where the model has an index of blocks."""

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
) -> tuple[Tensor, Tensor | None]:
    """Attend over the host-resident history of a request.

    A layer that topkv leaves alone has another cache, whose keys are not marked, and is attended
    by the function that the model had.

    Args:
        module: the attention module.
        query: ``[B, H, q, D]`` post-RoPE.
        key, value: ``[B, Hkv, q, D]`` of the new tokens alone, the key marked by the cache.
        attention_mask: None; padding is known to the cache.
        kwargs: what the core knows from the shape of the model, or need not know.

    Returns:
        ``[B, q, H, D]`` without a backward, and None for the weights.

    Raises:
        RequestError: the key comes from no ``TopkvCache``.
        CapabilityError: the module masks keys, or changes their scores.
    """
    if torch.compiler.is_compiling():
        own = kwargs.get(SINKS), kwargs.get("softcap")
        return torch.ops.topkv.attend(query, key, value, *own), None
    mark: tuple[Forward, int] | None = getattr(key, MARK, None)
    if mark is None:
        weighed: tuple[Tensor, Tensor | None] = _own_function(module)(
            module, query, key, value, attention_mask, **kwargs
        )
        return weighed
    forward, layer = mark
    window, longest = kwargs.get("sliding_window"), forward.coordinator.config.max_request_tokens
    asked = {
        "attention_mask": attention_mask is not None,
        "sliding_window": window is not None and window < longest,
        "softcap": kwargs.get("softcap") != forward.coordinator.model.softcap,
    }
    if any(asked.values()):
        _refuse(module, [name for name, other in asked.items() if other])
    with torch.no_grad():
        q, k, v = (forward.pack(tensor.transpose(1, 2)) for tensor in (query, key, value))
        sinks = kwargs.get(SINKS)
        sinks = None if sinks is None else sinks.float()
        index = _index(forward, kwargs.get(PROJECTED))
        out = forward.unpack(forward.attend(layer, q, k, v, index, sinks), len(query))
    return without_backward(out, (query, key, value)), None


def _index(forward: Forward, projected: tuple[Tensor, Tensor] | None) -> Index | None:
    """The index of the rows of a forward."""
    if projected is None:
        return None
    q, k = (forward.pack(each.transpose(1, 2)) for each in projected)
    return Index(q, k.squeeze(1))


def _refuse(module: nn.Module, asked: list[str]) -> None:
    raise CapabilityError(
        "this forward cannot run through topkv",
        [
            f"{type(module).__name__} asks for its own {', '.join(asked)}, which the core "
            "does not compute. If the config was changed since the model was attached, undo that "
            "or attach again; else the class must be refused: report it"
        ],
    )


_open: dict[int, NamedAttention] = {}
"""Named attention functions by the id of a config whose decoder calls ours now."""


def _own_function(module: Any) -> Any:
    """The function that attends in a layer that topkv leaves alone.

    Raises:
        RequestError: the module is in no such layer.
    """
    named = _open.get(id(module.config))
    if named is None or module not in named.left_alone:
        raise RequestError(
            "attention was asked for keys that come from no TopkvCache while a topkv forward "
            f"is open: {SHARED}"
        )
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS.get_interface(named.own, eager)


def mask(*args: Any, mask_function: Any, config: Any, **kwargs: Any) -> Any:
    """None where nothing is masked but what comes later, as within a window of all positions: the
    core attends causally, and rows are packed. Other layers get the mask of the model's own
    function, which for ``eager`` asks the host; a step that sees all of each window gets none,
    which adds no zeros to its scores."""
    named = _open.get(id(config))
    if mask_function is causal_mask_function or named is None or covering_window(config):
        return None
    if named.sees_all and named.own == "eager":
        return None
    own = ALL_MASK_ATTENTION_FUNCTIONS[named.own]
    return own(*args, mask_function=mask_function, config=config, **kwargs)


def register() -> None:
    """Make the name known to Transformers. Idempotent."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


class NamedAttention:
    """The attention function that a decoder calls: ours while a forward is open, else its own.

    Args:
        decoder: the decoder.
        left_alone: modules of layers for which ours calls its own.
    """

    def __init__(self, decoder: Any, left_alone: set[nn.Module]) -> None:
        self.decoder, self.left_alone = decoder, left_alone
        self.own = decoder.config._attn_implementation
        self.sees_all = False

    def name_ours(self, sees_all: bool = False) -> None:
        """Have the decoder call ours, until ``restore``.

        Args:
            sees_all: each query sees all tokens that layers hold that are left alone.
        """
        self.sees_all = sees_all
        config = self.decoder.config
        # The user may have chosen another one since the model was attached.
        if config._attn_implementation != NAME:
            self.own = config._attn_implementation
        _open[id(config)] = self
        config._attn_implementation = NAME

    def check(self) -> None:
        """Raise RequestError if the decoder would call another function than ours."""
        if self.decoder.config._attn_implementation != NAME:
            raise RequestError(
                "the attention function was changed while a topkv forward is open: " + SHARED
            )

    def restore(self) -> None:
        """Have the decoder call its own. Idempotent."""
        config = self.decoder.config
        if id(config) not in _open:
            return  # nothing was named, which is dearer to see in the config
        if config._attn_implementation == NAME:
            config._attn_implementation = self.own
        _open.pop(id(config), None)
