"""The layers of a decode step through ``torch.compile``, so that all between matrix products and
attention takes few kernels.

All layers are one function of a layer and its inputs, which is compiled once for each number of
rows, and once more for a layer that differs from those before it in more than its weights. Where a
layer keeps its rows is no part of that: to the compiler topkv's attention is one operator,
``attend``, which asks this thread what layer it runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import reset_code

from topkv.config import LoweredConfig
from topkv.errors import RequestError
from topkv_transformers.attention import SINKS, attention
from topkv_transformers.cache import TopkvCache

# The steps are recorded in graphs of ours. Whole layers or none: breaks would hide what is lost.
COMPILE = partial(
    torch.compile, fullgraph=True, dynamic=False, options={"triton.cudagraphs": False}
)

_running: ContextVar[tuple[nn.Module, TopkvCache] | None] = ContextVar("running", default=None)
"""The attention module of the layer that this thread runs, and the cache that it appends to."""


@torch.library.custom_op("topkv::attend", mutates_args=())
def attend(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, softcap: float | None
) -> Tensor:
    """Attention of the layer that runs, for the compiler one opaque operator.

    Args:
        query: ``[B, H, q, D]`` post-RoPE.
        key, value: ``[B, Hkv, q, D]`` of the new tokens.
        sinks, softcap: what else the module hands on.

    Returns:
        ``[B, q, H, D]``.

    Raises:
        RequestError: no layer of a ``CompiledLayers`` runs.
    """
    running = _running.get()
    if running is None:
        raise RequestError(
            "an attached model was compiled from outside, which cannot be served; leave "
            "torch.compile out, and attach the model with compile: true and capture: auto"
        )
    module, cache = running
    key, value = cache.update(key, value, module.layer_idx)
    return attention(module, query, key, value, **{SINKS: sinks}, softcap=softcap)[0]


@attend.register_fake
def _like(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, softcap: float | None
) -> Tensor:
    batch, heads, columns, _ = query.shape
    return query.new_empty((batch, columns, heads, value.shape[-1]))


def refusals(decoder: Any, config: LoweredConfig) -> list[str]:
    """Reasons why layers cannot be compiled even where steps are captured."""
    reasons, layers = [], len(decoder.layers)
    if others := layers - config.model.num_layers:
        reasons.append(
            f"{others} of {layers} layers keep a cache of their own, and cannot be compiled yet"
        )
    if config.model.attention != "gqa":
        reasons.append(f"layers with attention {config.model.attention!r} cannot be compiled yet")
    elif config.model.indexer is not None:
        reasons.append("layers with an index of their own cannot be compiled yet")
    if torch._dynamo.config.disable or not torch._dynamo.is_dynamo_supported():
        reasons.append("torch.compile does nothing here: TORCHDYNAMO_DISABLE is set, say")
    return reasons


class CompiledLayers:
    """The layers of a decoder, compiled for steps of one number of rows.

    What was compiled is freed with this object.

    Args:
        decoder: whose layers stay as they are, but for the time in ``installed``.
        cache: that they append to.
    """

    def __init__(self, decoder: Any, cache: TopkvCache) -> None:
        self.layers, self.cache = list(decoder.layers), cache

        def run(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return type(layer).forward(layer, *args, **kwargs)

        # Dynamo keeps what it has compiled with the code, which others of this class would share,
        # and keeps that code until it is reset.
        run.__code__ = run.__code__.replace()
        self._compiled = COMPILE(run)
        weakref.finalize(self, reset_code, run.__code__).atexit = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have the layers run compiled inside, and as before afterwards."""
        limit = max(torch._dynamo.config.recompile_limit, len(self.layers))
        try:
            for layer in self.layers:
                layer.forward = partial(self._run, layer)
            with torch._dynamo.config.patch(recompile_limit=limit):
                yield
        finally:
            for layer in self.layers:
                layer.__dict__.pop("forward", None)

    def _run(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        token = _running.set((layer.self_attn, self.cache))
        try:
            return self._compiled(layer, *args, **kwargs)
        finally:
            _running.reset(token)
