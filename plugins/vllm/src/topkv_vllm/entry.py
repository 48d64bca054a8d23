"""Entry of the plugin, through which topkv finds the engine ``vllm``.

Processes of vLLM call ``vllm_register``.
"""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry

BACKEND = "topkv_vllm.backend.TopkvBackend"
"""Path by which vLLM finds the attention backend ``CUSTOM``."""


@hookimpl
def topkv_register_engines() -> list[PluginEntry]:
    return [
        PluginEntry(
            "vllm",
            "engine",
            "topkv_vllm.engine:VllmEngine",
            hook_api=(3, 0),
            capabilities=Capabilities(tiers=("cpu", "gpu")),
            doctor="topkv_vllm.versions:doctor",
        )
    ]


def vllm_register() -> None:
    """Give ``--attention-backend CUSTOM`` a meaning. Changes nothing for those who do not say it.

    A backend that somebody else has registered before is left as it is; the worker reports it.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
