"""Search for a FlashAttention-3: two places, looked at in this order.

1. ``flash_attn_interface``: upstream's FlashAttention-3 (the package ``flash_attn_3``).
2. ``vllm``: the FlashAttention-3 that vLLM ships. The environment variable ``TOPKV_FA3_LIBRARY``
   may name its library file (``_vllm_fa3_C.abi3.so``); vLLM itself is not imported.

A place is recognised by what it offers, not by its version.
"""

from __future__ import annotations

import os
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from topkv_authoring.libraries import BROKEN, Places, UnusableError, in_one_line, module_with
from topkv_flash_attention.hopper import FlashAttention3

LIBRARY = "TOPKV_FA3_LIBRARY"
"""Environment variable that names the library file of vLLM's FlashAttention-3."""


def _version(package: str) -> str:
    """Version of an installed package, with a blank before it; empty where it says none."""
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


def _upstream() -> FlashAttention3:
    module_with("flash_attn_interface", {})
    return _hopper(f"flash_attn_interface{_version('flash_attn_3')}", torch.ops.flash_attn_3)


def _vllm() -> FlashAttention3:
    operators = torch.ops._vllm_fa3_C
    if hasattr(operators, "fwd"):  # a second copy would register the same names
        where = [each for each in torch.ops.loaded_libraries if "fa3" in Path(each).name]
        return _hopper(f"FlashAttention-3 of vLLM, {where[0] if where else 'loaded'}", operators)
    path = _vllm_file()
    try:
        torch.ops.load_library(str(path))
    except BROKEN as error:
        raise UnusableError(f"{path} does not load: {in_one_line(error)}") from error
    return _hopper(f"FlashAttention-3 of vLLM, {path}", operators)


def _vllm_file() -> Path:
    """Path of vLLM's library: as the environment says, else in an installed vLLM."""
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


BUILDS = Places[FlashAttention3](
    "no build of FlashAttention serves it: pip install vllm, or name its library file in "
    f"{LIBRARY}",
    {"flash_attn_interface": _upstream, "vllm": _vllm},
)
describe = BUILDS.describe
