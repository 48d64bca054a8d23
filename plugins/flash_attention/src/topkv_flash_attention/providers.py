"""Which FlashAttention is there: four places, looked at in this order.

1. ``flash_attn_interface``: upstream's FlashAttention-3 (the package ``flash_attn_3``).
2. ``vllm``: the FlashAttention-3 that vLLM ships. The environment variable ``TOPKV_FA3_LIBRARY``
   may name its library file (``_vllm_fa3_C.abi3.so``); vLLM itself is not imported.
3. ``flash_attn.cute``: FlashAttention-4 (the package ``flash-attn-4``).
4. ``flash_attn``: FlashAttention-2 (the package ``flash-attn``).

A place is recognised by what it offers, not by its version.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from topkv.types import GroupShape, ModelShape
from topkv_flash_attention.hopper import FlashAttention3
from topkv_flash_attention.library import Capability, Library
from topkv_flash_attention.others import FlashAttention2, FlashAttention4

LIBRARY = "TOPKV_FA3_LIBRARY"
"""Environment variable that names the library file of vLLM's FlashAttention-3."""

_BROKEN = (ImportError, OSError, RuntimeError, AttributeError)
"""What packages raise whose binaries do not fit this torch, driver or device."""


class UnusableError(Exception):
    """A place holds nothing that can be called; says why."""


@frozen
class Found:
    """What one place holds.

    Attributes:
        place: one of ``PLACES``.
        library: what was found; None with a ``problem``.
    """

    place: str
    library: Library | None
    problem: str = ""

    def __str__(self) -> str:
        told = self.problem if self.library is None else f"ok, {self.library.name}"
        return f"{self.place}: {told}"


def choose(
    model: ModelShape, group: GroupShape, capability: Capability | None
) -> tuple[Library | None, list[str]]:
    """The first library that serves a group, and why those before it do not.

    Args:
        capability: of the device; None where there is no CUDA device.
    """
    reasons = []
    for found in look():
        if found.library is None:
            reasons.append(str(found))
            continue
        refusals = found.library.refusals(model, group, capability)
        if not refusals:
            return found.library, reasons
        reasons.append(f"{found.place}: {'; '.join(refusals)}")
    return None, reasons


def describe() -> list[str]:
    """One line for each place, as a report of the machine shows it."""
    return [str(found) for found in look()]


def look() -> Iterator[Found]:
    """Every place in order; one is looked at when it is asked for."""
    for place, load in PLACES.items():
        try:
            yield Found(place, load())
        except UnusableError as reason:
            yield Found(place, None, str(reason))


def _import(name: str) -> Any:
    """The module.

    Raises:
        UnusableError: it is not installed, or does not import.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise UnusableError("not installed") from error
        raise UnusableError(f"does not import: it needs {error.name}") from error
    except _BROKEN as error:
        raise UnusableError(f"does not import: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _version(package: str) -> str:
    """Of an installed package, with a blank before it; empty where it says none."""
    try:
        return f" {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return ""


def _hopper(name: str, operators: Any) -> FlashAttention3:
    """FlashAttention-3 behind a namespace of ``torch.ops``."""
    if not hasattr(operators, "fwd"):
        raise UnusableError("it registers no operator fwd")
    try:
        return FlashAttention3.of(name, operators.fwd.default)
    except ValueError as error:
        raise UnusableError(str(error)) from error


def _upstream() -> Library:
    _import("flash_attn_interface")
    return _hopper(f"flash_attn_interface{_version('flash_attn_3')}", torch.ops.flash_attn_3)


def _vllm() -> Library:
    operators = torch.ops._vllm_fa3_C
    if hasattr(operators, "fwd"):  # a second copy would register the same names
        where = [each for each in torch.ops.loaded_libraries if "fa3" in Path(each).name]
        return _hopper(f"FlashAttention-3 of vLLM, {where[0] if where else 'loaded'}", operators)
    path = _vllm_file()
    try:
        torch.ops.load_library(str(path))
    except _BROKEN as error:
        raise UnusableError(f"{path} does not load: {_first_line(error)}") from error
    return _hopper(f"FlashAttention-3 of vLLM, {path}", operators)


def _vllm_file() -> Path:
    """Where the library lies: as the environment says, else in an installed vLLM."""
    named = os.environ.get(LIBRARY)
    if named:
        if not Path(named).is_file():
            raise UnusableError(f"{LIBRARY} is {named}, and there is no such file")
        return Path(named)
    spec = find_spec("vllm")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder, "vllm_flash_attn").glob("_vllm_fa3_C*.so")):
            return path
    what = "its package has no _vllm_fa3_C*.so" if spec else "not installed"
    raise UnusableError(f"{what}; {LIBRARY} may name the library file")


def _cute() -> Library:
    forward = _function(
        "flash_attn.cute.interface",
        "_flash_attn_fwd",
        *("q", "k", "v", "seqused_k", "max_seqlen_k", "page_table", "softmax_scale", "causal"),
        *("num_splits", "return_lse", "out"),
    )
    return FlashAttention4(f"flash_attn.cute{_version('flash-attn-4')}", forward)


def _second() -> Library:
    with_cache = _function(
        "flash_attn",
        "flash_attn_with_kvcache",
        *("cache_seqlens", "block_table", "softmax_scale", "num_splits", "return_softmax_lse"),
    )
    dense = _function(
        "flash_attn", "flash_attn_func", "softmax_scale", "causal", "return_attn_probs"
    )
    return FlashAttention2(f"flash_attn{_version('flash-attn')}", with_cache, dense)


def _function(module: str, name: str, *arguments: str) -> Callable[..., Any]:
    """A function of a module that takes these arguments.

    Raises:
        UnusableError: there is none.
    """
    function: Callable[..., Any] | None = getattr(_import(module), name, None)
    if function is None:
        raise UnusableError(f"{module} has no {name}")
    taken = inspect.signature(function).parameters
    lacking = [each for each in arguments if each not in taken]
    if lacking:
        raise UnusableError(f"{module}.{name} takes no {', '.join(lacking)}")
    return function


PLACES: dict[str, Callable[[], Library]] = {
    "flash_attn_interface": _upstream,
    "vllm": _vllm,
    "flash_attn.cute": _cute,
    "flash_attn": _second,
}
