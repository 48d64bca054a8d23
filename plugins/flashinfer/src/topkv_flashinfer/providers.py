"""Parts of the installed FlashInfer, found by names and arguments, not by the version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen

from topkv_authoring.libraries import Places, module_with


@frozen
class Library:
    """One part of the library.

    Attributes:
        name: name and version.
        functions: what the backend calls directly: first components of the names in ``PARTS``.
    """

    name: str
    functions: Mapping[str, Callable[..., Any]]

    def __getitem__(self, name: str) -> Any:
        return self.functions[name]


def version() -> str:
    """Version of the library as it says itself, "of no version" where it does not."""
    return str(getattr(module_with("flashinfer", {}), "__version__", "of no version"))


def describe() -> list[str]:
    """Return what is usable here, a line for each part."""
    return [f"{name}: {line}" for name, part in PARTS.items() for line in part.describe()]


def _part(name: str, wanted: Mapping[str, tuple[str, ...]]) -> Places[Library]:
    """A part of the library: a module, and by name arguments that functions in it must take."""

    def load() -> Library:
        module = module_with(name, wanted)
        called = {path.partition(".")[0] for path in wanted}
        return Library(f"flashinfer {version()}", {each: getattr(module, each) for each in called})

    return Places("FlashInfer is not usable: pip install flashinfer-python", {name: load})


PARTS = {
    "gqa": _part(
        "flashinfer",
        {
            "BatchDecodeWithPagedKVCacheWrapper.run": ("out", "lse", "enable_pdl"),
            "BatchDecodeWithPagedKVCacheWrapper.workspace_size": ("sm_scale", "logits_soft_cap"),
            "BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer": (),
            "single_prefill_with_kv_cache": (
                *("packed_custom_mask", "return_lse", "backend", "logits_soft_cap"),
            ),
        },
    ),
    "mla": _part(
        "flashinfer.mla",
        {
            "BatchMLAPagedAttentionWrapper.plan": ("metadata", "lse_mode"),
            "BatchMLAPagedAttentionWrapper.run": ("query", "kv_cache", "lse"),
            "MLAPlanMetadata.csr": ("kv_len_arr",),
        },
    ),
}
"""Parts of the library by kind of attention; each is looked for in one place."""
