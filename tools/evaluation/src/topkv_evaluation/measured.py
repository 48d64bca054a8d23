"""Memory and transfers of an attached model, as the commands show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from topkv_transformers.session import AttachedModel


def settings_of(handle: AttachedModel) -> dict[str, Any]:
    """Return the settings that results depend on.

    Budget, buffer and unit, in tokens, are of the first sparse layers; 0 if all are dense.
    """
    config = handle.config
    sparse = [group for group in config.groups if group.shape.residency == "sparse"]
    first = sparse[0] if sparse else None
    dense = {layer for group in config.groups for layer in group.shape.layers}
    dense -= {layer for group in sparse for layer in group.shape.layers}
    return {
        "algorithm": first.algorithm if first else None,
        "backend": config.backend,
        "impl": config.impl,
        "device": str(config.device),
        "dtype": str(config.model.dtype).removeprefix("torch."),
        "budget_tokens": first.budget if first else 0,
        "buffer_tokens": first.shape.buffer_slots * first.shape.unit if first else 0,
        "unit": first.shape.unit if first else 0,
        "dense_layers": sorted(dense),
    }


def measured(handle: AttachedModel, slots: Sequence[int]) -> dict[str, Any]:
    """Count bytes of tensors, and the loads of requests in ``slots`` so far."""
    memory, moved = handle.memory(), handle.coordinator.transfers_of(slots)
    return {
        "device_kv_bytes": memory.device_kv,
        "representation_bytes": memory.representation,
        "metadata_bytes": memory.metadata,
        "host_kv_bytes": memory.host,
        "loaded_bytes": moved.loaded_bytes,
        "misses": moved.misses,
        "hit_rate": moved.hit_rate,
    }


def stats_of(handle: AttachedModel) -> dict[str, Any]:
    """Return ``handle.stats()`` as the commands print it: sparse layers, and what is held."""
    stats = handle.stats()
    stalls = handle.coordinator.observers.counts.get("stalls", dict)()
    layers = [
        {
            "layer": layer,
            "hits": report.hits,
            "misses": report.misses,
            "hit_rate": report.hit_rate,
            "loaded_bytes": report.loaded_bytes,
            "stall_ms": stalls.get(layer),
        }
        for layer, report in stats.transfers.layers.items()
    ]
    return {"layers": layers, **attrs.asdict(stats.occupancy)}
