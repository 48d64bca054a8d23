"""Hook specs of an engine integration; its factory takes the ``PluginRegistry`` in use."""

from __future__ import annotations

from typing import Any

from topkv.hooks.registry import hookspec


@hookspec(firstresult=True)
def refusals(model: object) -> list[str]:  # type: ignore[empty-body]
    """Why this engine cannot serve the model; empty if it can. Changes nothing."""


@hookspec(firstresult=True)
def attach(model: object, config: Any) -> Any:
    """Make the model decode through topkv. Returns a handle with ``detach()``.

    Args:
        model: the engine's model object.
        config: a ``SparseConfig``.
    """
