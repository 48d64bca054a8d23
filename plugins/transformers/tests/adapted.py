"""A model whose keys follow from more than weights, and every way to change it."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import nn


class Scale:
    """An object that is no module, as adapters and quantisers keep."""

    def __init__(self):
        self.factor = 1.0


def added(shift, x):
    return x + shift


class Adapted(nn.Module):
    """A projection with adapters that are chosen by name, and values of every kind beside them."""

    def __init__(self, base, seed):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.base, width = base, base.out_features
        self.adapters = nn.ModuleDict({name: nn.Linear(base.in_features, width) for name in "ab"})
        for adapter in self.adapters.values():
            adapter.weight.data = torch.randn(adapter.weight.shape, generator=draw) / 4
        self._active, self.scaling, self.enabled = ["a"], {"a": 1.0, "b": 1.0}, True
        self.mode, self.scale, self.then = "plain", Scale(), partial(added, 0.0)
        self.plain = torch.zeros(width, device=base.weight.device)
        self.register_buffer("shift", torch.zeros(width))

    def forward(self, x):
        y = self.base(x) * self.scale.factor + self.shift + self.plain
        for name in self._active if self.enabled else ():
            y = y + self.scaling[name] * self.adapters[name](x)
        return self.then(-y if self.mode == "turned" else y)


def adapted(model):
    """The model with such projections of keys and values."""
    for number, layer in enumerate(model.model.layers):
        for name in ("k_proj", "v_proj"):
            base = getattr(layer.self_attn, name)
            setattr(layer.self_attn, name, Adapted(base, number).to(base.weight.device))
    return model.eval()


def _swap(tensor):
    """Two rows change places: the sum of all elements stays."""
    with torch.no_grad():
        tensor.copy_(tensor[[1, 0, *range(2, len(tensor))]])


def _in_place(tensor, value):
    with torch.no_grad():
        tensor.fill_(value)


def _new_data(module, value):
    module.base.weight.data = module.base.weight.detach() + value


CHANGES = {
    "flag": lambda module, value: setattr(module, "enabled", value % 2 == 0),
    "list": lambda module, value: module._active.__setitem__(slice(1), ["ab"[value % 2]]),
    "several": lambda module, value: setattr(module, "_active", list("ab"[: value % 3])),
    "mapping": lambda module, value: module.scaling.__setitem__("a", 1.0 + value),
    "text": lambda module, value: setattr(module, "mode", ["plain", "turned"][value % 2]),
    "object": lambda module, value: setattr(module.scale, "factor", 1.0 + value),
    "partial": lambda module, value: setattr(module, "then", partial(added, float(value))),
    "plain tensor": lambda module, value: _in_place(module.plain, value),
    "other tensor": lambda module, value: setattr(module, "plain", module.plain + value),
    "buffer": lambda module, value: _in_place(module.shift, value),
    "weights": lambda module, value: _in_place(module.base.weight[value], value),
    "rows": lambda module, value: _swap(module.base.weight),
    "data": _new_data,
    "adapter": lambda module, value: _in_place(module.adapters["a"].weight[value], value),
}
"""Each takes an ``Adapted`` and a number, and changes what it computes or leaves it as it is."""


def change(model, kind, value):
    """Change the last layer's keys, which nothing but attention follows from."""
    CHANGES[kind](model.model.layers[-1].self_attn.k_proj, value)


def stock_of(model):
    """A copy that nothing is attached to."""
    return copy.deepcopy(model)
