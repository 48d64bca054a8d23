"""Hooks and replaced ``forward`` methods of a model, and what they may change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from topkv_transformers.names import HANDLE

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def is_hooked(module: nn.Module | None) -> bool:
    """True if something that a replay would leave out watches or replaces a module.

    Those of Transformers collect what a call asks for, and such calls are not replayed.

    Args:
        module: inside of a decoder, whose own hooks run with every call; None for hooks that torch
            runs around every module.
    """
    if module is None:
        return any(getattr(torch_module, f"_global{hooks}") for hooks in _HOOKS)
    attributes = vars(module)
    replaced = attributes.get("forward")
    if replaced is not None and not type(replaced).__module__.startswith("topkv_transformers."):
        return True
    hooks = (attributes[name] for name in _HOOKS)
    return any(any(_foreign(each.values())) for each in hooks if each)


def changes_inputs(model: nn.Module, decoder: nn.Module) -> list[str]:
    """Reasons why the decoder may see other inputs than a call of the model was given."""
    ours = getattr(decoder, HANDLE, None)
    reasons = []
    for name, module in (("model", model), ("decoder", decoder)):
        hooks = _foreign(module._forward_pre_hooks.values())
        if any(getattr(hook, "__self__", None) is not ours for hook in hooks):
            reasons.append(f"a forward pre-hook of the {name} may change its inputs")
    if "forward" in vars(model) and model is not decoder:
        reasons.append("the forward of the model was replaced")
    return reasons


def _foreign(hooks: Iterable[Any]) -> Iterator[Any]:
    """Hooks that are not Transformers' own."""
    named = ((hook, str(getattr(hook, "__module__", ""))) for hook in hooks)
    return (hook for hook, module in named if not module.startswith("transformers."))
