"""The model ``topkv`` of lm-evaluation-harness, by its name where ``register`` was called."""

from __future__ import annotations

NAME = "topkv"


def register() -> None:
    """Let the harness find the model by its name. Idempotent; nothing heavy is imported."""
    # Its own names are there only once its models are imported.
    import lm_eval.models  # noqa: F401
    from lm_eval.api.registry import model_registry

    if NAME not in model_registry:
        model_registry.register(NAME, target="topkv_lm_eval.model:TopkvLM")
