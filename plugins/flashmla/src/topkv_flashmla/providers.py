"""Search for FlashMLA's kernels: the first package that has what the backend calls.

1. ``flash_mla``: DeepSeek's own package up to September 2026, and ``sgl-flash-mla``, which has
   the same module name and keeps the kernels of Hopper behind ``use_legacy=True``, where it was
   built with them. DeepSeek's release of 2026-09-30 dropped them, and dense decode with them:
   there ``is_fp8_kvcache`` is True unless said otherwise.
2. ``vllm.third_party.flashmla``: the build that vLLM carries.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from attrs import field, frozen

from topkv_authoring.libraries import Places, UnusableError, module_with

MODULES = ("flash_mla", "vllm.third_party.flashmla.flash_mla_interface")
FUNCTIONS = ("flash_mla_with_kvcache", "flash_mla_sparse_fwd", "get_mla_metadata")


@frozen
class Provider:
    """The functions of one build.

    Attributes:
        name: module, and version where it has one.
        decode: ``flash_mla_with_kvcache``.
        sparse: ``flash_mla_sparse_fwd``.
        new_metadata: makes an empty holder of scheduler metadata.
        options: keyword arguments that this build needs on Hopper.
    """

    name: str
    decode: Callable[..., Any]
    sparse: Callable[..., Any]
    new_metadata: Callable[[], Any]
    options: Mapping[str, Any] = field(factory=dict)


def _load(name: str) -> Provider:
    module = module_with(name, {})
    lacking = [function for function in FUNCTIONS if not hasattr(module, function)]
    lacking = lacking or _lacking(module)
    if lacking:
        raise UnusableError(f"it has no {', '.join(lacking)}")
    return _provider(name, module)


def _lacking(module: Any) -> list[str]:
    """Return what the backend needs and the signatures of a build do not have."""
    decode = inspect.signature(module.flash_mla_with_kvcache).parameters
    sparse = inspect.signature(module.flash_mla_sparse_fwd).parameters
    lacking = [f"argument {name} of decode" for name in ("indices",) if name not in decode]
    lacking += [f"argument {n} of prompts" for n in ("topk_length",) if n not in sparse]
    if not _has_hopper(module, decode):
        lacking.append("kernels for Hopper")
    metadata = inspect.signature(module.get_mla_metadata).parameters.values()
    if any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in metadata):
        lacking.append("metadata that is filled by the first call")
    return lacking


def _has_hopper(module: Any, decode: Mapping[str, inspect.Parameter]) -> bool:
    if "use_legacy" in decode:
        return bool(getattr(module, "has_legacy", lambda: True)())
    stored = decode.get("is_fp8_kvcache")
    return stored is None or stored.default is not True


def _provider(name: str, module: Any) -> Provider:
    legacy = "use_legacy" in inspect.signature(module.flash_mla_with_kvcache).parameters
    version = getattr(module, "__version__", "")
    return Provider(
        name=f"{name} {version}".strip(),
        decode=module.flash_mla_with_kvcache,
        sparse=module.flash_mla_sparse_fwd,
        new_metadata=lambda: module.get_mla_metadata()[0],
        options={"use_legacy": True} if legacy else {},
    )


BUILDS = Places(
    "no build of FlashMLA is usable: pip install sgl-flash-mla, say",
    {name: partial(_load, name) for name in MODULES},
)
describe = BUILDS.describe
