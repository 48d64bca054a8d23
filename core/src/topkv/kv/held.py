"""Counts the bytes of tensors that an object of any class holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

_CODE = (type, ModuleType, FunctionType)
"""Types that are not followed: they hold no tensors, but reach the names of their module and by
them the whole process. So do functions of Triton, compiled and interpreted, which need not be
installed."""

_OPAQUE = (str, bytes, int, float, torch.device, torch.dtype, *_CODE)


def tensor_bytes(holders: object, without: object = ()) -> int:
    """Bytes of the storages that objects hold; each storage counts once.

    Args:
        holders: objects, or containers of them, whose attributes are followed.
        without: objects whose storages are not counted.
    """
    counted = {tensor.untyped_storage()._cdata for tensor in _tensors(without, set())}
    total = 0
    for tensor in _tensors(holders, set()):
        storage = tensor.untyped_storage()
        if storage._cdata not in counted:
            counted.add(storage._cdata)
            total += storage.nbytes()
    return total


def _tensors(holder: Any, visited: set[int]) -> Iterator[Tensor]:
    """Tensors that can be reached from an object."""
    code = isinstance(holder, _OPAQUE) or type(holder).__module__.startswith("triton.")
    if code or holder is None or id(holder) in visited:
        return
    visited.add(id(holder))
    if isinstance(holder, Tensor):
        yield holder
        return
    for value in _parts(holder):
        yield from _tensors(value, visited)


def _parts(holder: Any) -> Iterable[Any]:
    if isinstance(holder, Mapping):
        return holder.values()
    if isinstance(holder, (list, tuple, set, frozenset)):
        return holder
    slots = [name for cls in type(holder).__mro__ for name in getattr(cls, "__slots__", ())]
    found = [getattr(holder, name, None) for name in slots if not name.startswith("__")]
    return [*found, *getattr(holder, "__dict__", {}).values()]
