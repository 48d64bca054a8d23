"""What the installed FlashInfer offers: found by names and arguments, not by the version."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from attrs import frozen

INSTALL = "pip install flashinfer-python"

PARTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "gqa": {
        "flashinfer:BatchDecodeWithPagedKVCacheWrapper.run": ("out", "lse", "enable_pdl"),
        "flashinfer:BatchDecodeWithPagedKVCacheWrapper.workspace_size": ("sm_scale",),
        "flashinfer:BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer": (),
        "flashinfer:single_prefill_with_kv_cache": ("packed_custom_mask", "return_lse", "backend"),
    },
    "mla": {
        "flashinfer.mla:BatchMLAPagedAttentionWrapper.plan": ("metadata", "lse_mode"),
        "flashinfer.mla:BatchMLAPagedAttentionWrapper.run": ("query", "kv_cache", "lse"),
        "flashinfer.mla:MLAPlanMetadata.csr": ("kv_len_arr",),
    },
}
"""By part of the plugin, ``module:name``, and arguments that it must take. The names that the
backend calls directly are the first component behind the colon."""


@frozen
class Library:
    """One part of the library.

    Attributes:
        name: name and version.
        functions: what ``PARTS`` names, by the first component behind the colon.
    """

    name: str
    functions: Mapping[str, Callable[..., Any]]

    def __getitem__(self, name: str) -> Any:
        return self.functions[name]


def find(part: str) -> tuple[Library | None, list[str]]:
    """A part of ``PARTS``, and everything that it lacks.

    Returns:
        The part, None where anything is missing; and what was tried and found wanting.
    """
    functions: dict[str, Callable[..., Any]] = {}
    reasons: list[str] = []
    for path, arguments in PARTS[part].items():
        module_name, names = path.split(":")
        module, failure = _import(module_name)
        if module is None:
            reasons.append(failure)
            continue
        owner = names.split(".")[0]
        found: Any = module
        for name in names.split("."):
            found = getattr(found, name, None)
        if found is None:
            reasons.append(f"{module_name}: it has no {names}")
            continue
        functions[owner] = getattr(module, owner)
        taken = inspect.signature(inspect.unwrap(found)).parameters
        reasons += [
            f"{module_name}: {names} takes no {name!r}" for name in arguments if name not in taken
        ]
    if reasons:
        return None, list(dict.fromkeys(reasons))
    return Library(f"flashinfer {version()}", functions), []


def version() -> str:
    """Version of the library as it says itself, "of no version" where it does not."""
    module, _ = _import("flashinfer")
    return str(getattr(module, "__version__", "of no version"))


def describe() -> list[str]:
    """What is usable here, a line for each part."""
    lines = []
    for part in PARTS:
        library, reasons = find(part)
        lines.append(f"{part}: {'; '.join(reasons) if library is None else f'ok, {library.name}'}")
    return lines


def _import(name: str) -> tuple[ModuleType | None, str]:
    try:
        return import_module(name), ""
    except (ImportError, OSError, RuntimeError) as error:
        said = str(error).splitlines() or ["no reason given"]
        return None, f"{name}: {type(error).__name__}: {said[0]}"
