"""Entry of the plugin, through which topkv finds the host format ``fp8``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@hookimpl
def topkv_register_host_formats() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="fp8",
            kind="host_format",
            factories={
                "reference": "topkv_fp8_host_format.format:Fp8",
                "triton": "topkv_fp8_host_format.entry_kernels:Fp8Kernels",
            },
            hook_api=(3, 0),
            capabilities=Capabilities(
                attention=("gqa",), dtypes=("float16", "bfloat16", "float32")
            ),
        )
    ]
