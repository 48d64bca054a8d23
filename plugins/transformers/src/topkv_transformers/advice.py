"""The algorithm that a model with an index of its own recommends."""

from __future__ import annotations

from collections.abc import Mapping

from topkv.plugins import PluginRegistry


def algorithm_of(registry: PluginRegistry, attention: str) -> Mapping[str, str]:
    """The only installed algorithm that uses a model's own index, as ``algorithm``; nothing where
    there is none, or a choice.

    Args:
        attention: of the model, ``"gqa"`` or ``"mla"``.
    """
    stated = [(r.name, r.entry.capabilities) for r in registry.usable("algorithm") if r.entry]
    names = [name for name, each in stated if each.needs_index and attention in each.attention]
    return {"algorithm": names[0]} if len(names) == 1 else {}
