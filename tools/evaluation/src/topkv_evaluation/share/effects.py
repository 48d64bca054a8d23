"""Effects of layers: how far the attention of each turns a model's residual stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from topkv_transformers.support import attention_modules


@contextmanager
def effects_of(model: PreTrainedModel) -> Iterator[Mapping[int, float]]:
    """Watch the forwards of a model that is decoded eagerly, one token at a time.

    Yields:
        By layer, as topkv counts them, ``1 - cos(x, x + a)`` of the newest token of the last
        forward: x is what comes into the layer, and a what its attention module gives.
    """
    names = {module: name for name, module in model.named_modules()}
    entered: dict[int, Tensor] = {}
    found: dict[int, float] = {}

    def enter(layer: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            x = args[0] if args else named["hidden_states"]
            entered[layer] = x[0, -1].float()

        return hook

    def leave(layer: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            x, added = entered[layer], out[0] if isinstance(out, tuple) else out
            both = x + added[0, -1].float()
            found[layer] = 1 - float(torch.cosine_similarity(x, both, dim=0))

        return hook

    hooks = []
    for layer, module in enumerate(attention_modules(model)):
        around = model.get_submodule(names[module].rpartition(".")[0])
        hooks += [
            around.register_forward_pre_hook(enter(layer), with_kwargs=True),
            module.register_forward_hook(leave(layer)),
        ]
    try:
        yield found
    finally:
        for each in hooks:
            each.remove()
