"""What this package offers to topkv, and to vLLM, whose processes call ``vllm_register``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry

BACKEND = "topkv_vllm.backend.TopkvBackend"
"""Where vLLM finds the attention backend ``CUSTOM``."""


@hookimpl
def topkv_register_engines() -> list[PluginEntry]:
    return [
        PluginEntry(
            "vllm",
            "engine",
            "topkv_vllm.engine:VllmEngine",
            hook_api=(2, 0),
            capabilities=Capabilities(tiers=("cpu", "gpu")),
            doctor="topkv_vllm.versions:doctor",
        )
    ]


def vllm_register() -> None:
    """Give ``--attention-backend CUSTOM`` a meaning. Changes nothing for those who do not say it.

    One that somebody else has registered before is left as it is; the worker tells.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
