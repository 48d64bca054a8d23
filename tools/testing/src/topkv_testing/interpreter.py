"""Triton's interpreter, made faster: what it works out anew for each operation is kept.

Values stay as they are to the bit. A Triton of another form than 3.6 to 3.8 goes on as it does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def quicken() -> None:
    """Change the interpreter of this process, once; call it where ``TRITON_INTERPRET`` is 1."""
    from triton.runtime import interpreter

    core = interpreter.tl.core
    if _takes(interpreter, "_patch_lang", "fn") and hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _patch_lang(interpreter)
    if _takes(interpreter, "_patch_builtin", "pkg", "builder", "scope"):
        interpreter._patch_builtin = _patch_builtin(interpreter)
    if _takes(interpreter, "_get_np_dtype", "tt_dtype"):
        interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    if _takes(core.block_type, "__init__", "self", "element_ty", "shape"):
        core.block_type.__init__ = _block_type(core)
    if _takes(core.tensor, "__init__", "self", "handle", "type"):
        core.tensor.__init__ = _tensor(core)
    _spare_overflow_checks(interpreter)


def _takes(owner: Any, name: str, *parameters: str) -> bool:
    """Return True if a function is there and takes exactly these parameters."""
    function = getattr(owner, name, None)
    return function is not None and [*inspect.signature(function).parameters] == [*parameters]


def _patch_lang(interpreter: Any) -> Callable[[Any], Any]:
    """Replace the language when a kernel is launched, and not again when it calls functions.

    Each call would list all members of ``triton.language`` and all names of the function's module.
    Members are replaced all or none, so that ``load`` shows it.
    """
    tl, is_builtin = interpreter.tl, interpreter.tl.core.is_builtin
    patch, seen = interpreter._patch_lang, dict[Any, list[Any]]()

    def once(fn: Any) -> Any:
        if fn not in seen:
            named = [each for each in fn.__globals__.values() if inspect.ismodule(each)]
            seen[fn] = [each for each in (tl, tl.core) if each in named]
        if seen[fn] and not any(is_builtin(each.load) for each in seen[fn]):
            return interpreter._LangPatchScope()
        return patch(fn)

    return once


def _patch_builtin(interpreter: Any) -> Callable[..., None]:
    """Look the language through once."""
    is_builtin, found = interpreter.tl.core.is_builtin, dict[Any, list[tuple[str, Any]]]()

    def patch(pkg: Any, builder: Any, scope: Any) -> None:
        if pkg not in found:
            members = inspect.getmembers(pkg)
            found[pkg] = [(name, bound(each)) for name, each in members if is_builtin(each)]
        for name, member in found[pkg]:
            scope.set_attr(pkg, name, member)

    def bound(member: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **named)

        return call

    return patch


def _by_name(np_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Keep the dtype of numpy that each type is held in."""
    found: dict[str, Any] = {}

    def get(tt_dtype: Any) -> Any:
        kept = found.get(tt_dtype.name)
        if kept is None:
            kept = found[tt_dtype.name] = np_dtype(tt_dtype)
        return kept

    return get


def _block_type(core: Any) -> Callable[..., None]:
    """Keep shape, number of elements and name of each type of blocks."""
    made, init = dict[Any, dict[str, Any]](), core.block_type.__init__

    def keep(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *map(core._unwrap_if_constexpr, shape))
        if key not in made:
            init(self, element_ty, shape)
            made[key] = {**vars(self)}
        else:
            vars(self).update(made[key], element_ty=element_ty)

    return keep


def _tensor(core: Any) -> Callable[..., None]:
    """Keep the shape and the number of elements that tensors of each type have."""
    made, init = dict[str, tuple[Any, Any]](), core.tensor.__init__

    def keep(self: Any, handle: Any, type: Any) -> None:
        if type.name not in made:
            init(self, handle, type)
            made[type.name] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = made[type.name]

    return keep


def _spare_overflow_checks(interpreter: Any) -> None:
    """Leave out what is computed for assertions of overflow, which are skipped then.

    Each 32-bit sum and product is computed once more in 64 bits and compared; without
    ``TRITON_DEBUG`` nobody looks at the result.
    """
    options = getattr(getattr(interpreter, "interpreter_builder", None), "options", None)
    if getattr(options, "debug", True) is False and hasattr(options, "sanitize_overflow"):
        object.__setattr__(options, "sanitize_overflow", False)
