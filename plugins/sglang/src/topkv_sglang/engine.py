"""The engine entry of SGLang, see ``topkv_engines.engine``."""

from __future__ import annotations

from topkv_engines.engine import ServingEngine


class SglangEngine(ServingEngine):
    """See ``ServingEngine``."""

    reason = (
        "SGLang makes its models in schedulers of its own, so there is none to attach; start it "
        "with sglang.Engine(model_path=model, **topkv_sglang.engine_args(config))"
    )
