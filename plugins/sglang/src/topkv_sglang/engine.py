"""The engine entry: SGLang makes its models itself, so none can be handed to ``topkv.attach``."""

from __future__ import annotations

from typing import Any, NoReturn

from topkv import hookimpl
from topkv.errors import CapabilityError
from topkv.hooks.engine import EngineSetup

REASON = (
    "SGLang makes its models in schedulers of its own, so there is none to attach; start it with "
    "sglang.Engine(model_path=model, **topkv_sglang.engine_args(config))"
)


class SglangEngine:
    """Takes no model object; says what to call instead.

    Args:
        setup: of every engine; not needed here.
    """

    def __init__(self, setup: EngineSetup) -> None:
        self.registry = setup.registry

    @hookimpl
    def refusals(self, model: object) -> list[str]:
        """See ``topkv.hooks.engine.Engine``."""
        return [REASON]

    @hookimpl
    def attach(self, model: object, config: Any) -> NoReturn:
        """See ``topkv.hooks.engine.Engine``.

        Raises:
            CapabilityError: always.
        """
        raise CapabilityError(f"{type(model).__qualname__} cannot be attached", [REASON])
