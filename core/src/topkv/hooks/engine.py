"""Hook specs of an engine integration, which ``factory(setup)`` makes from an ``EngineSetup``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from topkv.plugins.discovery import hookspec

if TYPE_CHECKING:
    from topkv.plugins import PluginRegistry


@frozen
class EngineSetup:
    """The argument of the factory of an engine integration.

    Attributes:
        registry: where algorithms and backends are looked up.
    """

    registry: PluginRegistry


class Engine(Protocol):
    """An engine integration."""

    @hookspec
    def refusals(self, model: object) -> list[str]:
        """Return reasons why this engine cannot serve the model, if any. Changes nothing."""

    @hookspec
    def attach(self, model: object, config: Any) -> Any:
        """Make the model decode through topkv. Returns a handle with ``detach()``.

        Args:
            model: the engine's model object.
            config: a ``SparseConfig``.
        """
