"""Changes of a model since before it was attached."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def state_of(model: object) -> dict[str, Any]:
    """The attributes of a model, of its modules and of the plain objects that these hold."""
    state: dict[str, Any] = {}
    modules: Any = model.named_modules() if isinstance(model, nn.Module) else [("", model)]
    for place, module in modules:
        for name, value in getattr(module, "__dict__", {}).items():
            state[f"{place}.{name}"] = _kept(value)
            if hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)):
                inner = vars(value).items()
                state |= {f"{place}.{name}.{key}": _kept(each) for key, each in inner}
    return state


def _kept(value: Any) -> Any:
    """A collection as it is now."""
    return value.copy() if isinstance(value, (dict, list, set)) else value


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The attributes that two states do not have in common."""
    gone = object()
    names = dict.fromkeys([*before, *after])
    return [name for name in names if not _same(before.get(name, gone), after.get(name, gone))]


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    return type(one) is type(other) and bool(one == other)
