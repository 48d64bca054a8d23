"""The engine entry of an engine that makes its models itself, so that none can be attached."""

from __future__ import annotations

from typing import Any, NoReturn

from topkv import hookimpl
from topkv.errors import CapabilityError
from topkv.hooks.engine import EngineSetup


class ServingEngine:
    """Takes no model object; says what to call instead.

    Args:
        setup: of every engine; not needed here.
    """

    reason: str
    """Reason against every model object, with what to call."""

    def __init__(self, setup: EngineSetup) -> None:
        self.registry = setup.registry

    @hookimpl
    def refusals(self, model: object) -> list[str]:
        """See ``topkv.hooks.engine.Engine``."""
        return [self.reason]

    @hookimpl
    def attach(self, model: object, config: Any) -> NoReturn:
        """See ``topkv.hooks.engine.Engine``.

        Raises:
            CapabilityError: always.
        """
        raise CapabilityError(f"{type(model).__qualname__} cannot be attached", [self.reason])
