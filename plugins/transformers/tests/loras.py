"""A model with two adapters of PEFT, and the ways to change what they compute."""

from __future__ import annotations

import torch


def with_loras(model):
    """The model with adapters ``a`` and ``b`` of queries, keys and values; ``a`` is active."""
    from peft import LoraConfig

    torch.manual_seed(3)
    config = LoraConfig(
        r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False
    )
    for name in "ab":
        model.add_adapter(config, name)
    model.set_adapter("a")
    return model.eval()


def _projection(model):
    return model.model.layers[-1].self_attn.k_proj


def _write(model, value):
    with torch.no_grad():
        _projection(model).lora_A["a"].weight[value].fill_(value)


def _merge(model, value):
    layer = _projection(model)
    if value % 2 and not layer.merged:
        layer.merge()
    elif layer.merged:
        layer.unmerge()


LORA_CHANGES = {
    "one": lambda model, value: model.set_adapter("ab"[value % 2]),
    "both": lambda model, value: model.set_adapter(["a", "b"]),
    "off and on": lambda model, value: (
        model.disable_adapters() if value % 2 else model.enable_adapters()
    ),
    "scale": lambda model, value: _projection(model).set_scale("a", 1.0 + value),
    "weights of an adapter": _write,
    "merged": _merge,
}
"""Each takes the model and a number."""


def change(model, kind, value):
    """Change what the last layer's keys follow from, or which adapters are active."""
    LORA_CHANGES[kind](model, value)
