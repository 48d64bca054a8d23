"""The engine entry of vLLM, see ``topkv_engines.engine``."""

from __future__ import annotations

from topkv_engines.engine import ServingEngine


class VllmEngine(ServingEngine):
    """See ``ServingEngine``."""

    reason = (
        "vLLM makes its models in workers of its own, so there is none to attach; start it with "
        "LLM(model, **topkv_vllm.engine_args(config))"
    )
