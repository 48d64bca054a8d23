"""All that is read of a model to distinguish one state of it from another.

Every module of a decoder is read with all of its attributes, and with those of lists, mappings,
objects and further modules inside. Tensors are compared by where they are stored and by the count
of writes that torch keeps for each, everything else by value.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedConfig

from topkv_transformers.hooks import is_hooked
from topkv_transformers.names import HANDLE

_PLAIN = {bool, int, float, str, bytes, complex, type(None)}
_PLAIN |= {torch.dtype, torch.device, torch.layout}
_PLAIN |= {range, slice, torch.memory_format, type(Ellipsis)}
_NAMED = (type, types.BuiltinFunctionType, types.ModuleType, logging.Logger, torch._ops.OpOverload)
_SILENT = (type(threading.Lock()), type(threading.RLock()), weakref.ref, re.Pattern, PurePath)
"""Types that hold nothing which keys could follow from, or nothing that changes."""

_BESIDE = set(vars(nn.Module())) - {"training"}
_BESIDE |= {HANDLE, "forward", "warnings_issued", "name_or_path", "_model_tags"}
"""Attributes of modules that are read otherwise, or that keys do not follow from."""

_OF_CONFIGS = {"_name_or_path", "name_or_path", "architectures", "dtype", "torch_dtype"}
_OF_CONFIGS |= {"transformers_version", "_commit_hash", "topkv"}
_OF_CONFIGS |= {"_attn_implementation_internal", "_experts_implementation_internal"}
"""Keys of a configuration that say where a model came from, or who computes and not what."""

_TENSORS = {Tensor, nn.Parameter}

LARGEST, MOST, DEEPEST = 1 << 20, 1 << 20, 100
"""Bytes of a NumPy array, values of a model, and levels of them, that are still read."""


class Walk:
    """A reading of a decoder at one time; two are equal if nothing has changed.

    Attributes:
        values: everything but tensors, in the order in which it was read; names included.
        places: of each tensor its storage, offset, strides, and count of writes.
        unwatched: every reason why a change could go unseen.
        hooked: a hook or a replaced ``forward`` stands inside, which a replay would leave out.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self.values: list[Any] = []
        self.places: list[tuple[Any, ...]] = []
        self.unwatched: list[str] = []
        self.hooked = is_hooked(None)
        self._forms: list[tuple[Any, ...]] = []
        self._tensors: list[weakref.ref[Tensor]] = []
        self._modules: list[weakref.ref[nn.Module]] = []
        self._seen: dict[int, int] = {}
        self._path: list[str] = []
        self._see(decoder)
        self._module(decoder)
        del self._seen

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Walk)
            and self.places == other.places
            and self.records_as(other)
            and self.unwatched == other.unwatched
            and self.hooked == other.hooked
        )

    __hash__ = None  # type: ignore[assignment]

    def records_as(self, other: Walk) -> bool:
        """True if a step that was recorded then can be replayed now: all but writes is equal."""
        return (
            self._modules == other._modules
            and self.values == other.values
            and [place[:-1] for place in self.places] == [place[:-1] for place in other.places]
        )

    @property
    def stable(self) -> tuple[Any, ...]:
        """All but the contents of tensors, for a hash that is equal in every process."""
        return self.values, self._forms

    def alive(self) -> list[Tensor]:
        """The tensors, of a model that has not changed since."""
        found = [reference() for reference in self._tensors]
        assert all(each is not None for each in found), "a state is used that is over"
        return found  # type: ignore[return-value]

    # One method for each kind of value.

    def _module(self, module: nn.Module) -> None:
        self._modules.append(weakref.ref(module))
        self._named(type(module))
        attributes, append = vars(module), self.values.append
        hooks = attributes["_forward_hooks"] or attributes["_forward_pre_hooks"]
        if (hooks or "forward" in attributes) and self._modules[1:]:
            self.hooked |= is_hooked(module)
        for owned in (attributes["_parameters"], attributes["_buffers"]):
            for name, tensor in owned.items():
                append(name)
                if tensor is not None:
                    self._path.append(name)
                    self._tensor(tensor)
                    self._path.pop()
        for name, value in attributes.items():
            if name in _BESIDE:
                continue
            if type(value) in _PLAIN:  # most are
                append(name)
                append(value)
            else:
                self._inside(name, value)
        for name, child in attributes["_modules"].items():
            self._inside(name, child)

    def _inside(self, name: Any, value: Any) -> None:
        self.values.append(name)
        if type(value) in _PLAIN:
            self.values.append(value)
            return
        self._path.append(str(name))
        self._value(value)
        self._path.pop()

    def _value(self, value: Any) -> None:
        kind = type(value)
        if len(self.values) > MOST or len(self._path) > DEEPEST:
            self._too_much()
        elif kind in _PLAIN:
            self.values.append(value)
        elif id(value) in self._seen:
            self.values.append(("as", self._seen[id(value)]))
        elif issubclass(kind, nn.Module):
            self._see(value)
            self._module(value)
        elif issubclass(kind, Tensor):
            self._tensor(value)
        elif issubclass(kind, tuple):
            self._many(kind, value)
        elif issubclass(kind, (list, deque)):
            self._see(value)
            self._many(kind, value)
        elif issubclass(kind, Mapping):
            self._see(value)
            self._many(kind, value.items())
        elif issubclass(kind, (set, frozenset)):
            self._many(kind, sorted(value, key=repr))
        elif issubclass(kind, Enum):
            self.values.append(repr(value))
        elif issubclass(kind, np.ndarray):
            self._array(value)
        elif issubclass(kind, np.generic):
            self.values.append(repr(value))
        elif issubclass(kind, _NAMED):
            self._named(value)
        elif issubclass(kind, _SILENT):
            self.values.append(kind.__name__)
        else:
            self._see(value)
            self._object(value)

    def _many(self, kind: type, values: Iterable[Any]) -> None:
        self.values.append(kind.__qualname__)
        count = 0
        for count, each in enumerate(values, 1):  # noqa: B007
            self._value(each)
        self.values.append(count)

    def _see(self, value: Any) -> None:
        """Read an object once, and name it by its number where it stands again."""
        self._seen[id(value)] = len(self._seen)

    def _named(self, value: Any) -> None:
        names = getattr(value, "__module__", ""), getattr(value, "__qualname__", str(value))
        self.values.append(".".join(map(str, names)))

    def _tensor(self, tensor: Tensor) -> None:
        self.values.append("tensor")
        if type(tensor) not in _TENSORS and is_traceable_wrapper_subclass(tensor):
            inner, context = tensor.__tensor_flatten__()
            self._named(type(tensor))
            for name in inner:
                self._inside(name, getattr(tensor, name))
            self._inside("context", context)
            return
        if tensor.layout is not torch.strided or tensor.is_quantized:
            self._unseen(f"a tensor of layout {tensor.layout} is not read")
            return
        version = -1
        if tensor.is_inference():
            self._unseen("it was made under torch.inference_mode(), where writes are not counted")
        else:
            version = tensor._version
        form = tensor.dtype, tuple(tensor.shape)
        self._forms.append(form)
        self._tensors.append(weakref.ref(tensor))
        where = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.stride()
        self.places.append((*where, *form, version))

    def _array(self, array: np.ndarray) -> None:
        self.values += [array.dtype.str, array.shape]
        if array.nbytes > LARGEST or array.dtype.hasobject:
            self._unseen(f"a NumPy array of {array.nbytes} bytes is not read")
        else:
            self.values.append(hashlib.sha256(array.tobytes()).digest())

    def _object(self, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self._named(value)
            self.values.append(value.__code__.co_code)
            cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            self._many(types.FunctionType, [*cells, value.__defaults__, value.__kwdefaults__])
        elif isinstance(value, types.MethodType):
            self._many(types.MethodType, [value.__func__, value.__self__])
        elif isinstance(value, functools.partial):
            self._many(functools.partial, [value.func, value.args, value.keywords])
        else:
            self._attributes(value)

    def _attributes(self, value: Any) -> None:
        kind = type(value)
        self._named(kind)
        beside = _OF_CONFIGS if isinstance(value, PreTrainedConfig) else ()
        slots = {name for each in kind.__mro__ for name in getattr(each, "__slots__", ())}
        found = {name: getattr(value, name) for name in sorted(slots) if hasattr(value, name)}
        found.pop("__weakref__", None)
        found |= getattr(value, "__dict__", {})
        if not found and not hasattr(value, "__dict__"):
            self._unseen(f"a {kind.__qualname__} is not read")
        for name, each in found.items():
            if name not in beside:
                self._inside(name, each)
        self.values.append(len(found))

    def _too_much(self) -> None:
        why = f"objects hold more than {MOST} values, or stand {DEEPEST} deep"
        if why not in self.values[-1:]:
            self._unseen(why)

    def _unseen(self, why: str) -> None:
        self.values.append(why)
        self.unwatched.append(f"{'.'.join(self._path) or 'the decoder'}: {why}")


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
