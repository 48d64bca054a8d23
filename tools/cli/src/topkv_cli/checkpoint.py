"""Report of ``topkv doctor --model`` on a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import evolve

from topkv.config import SparseConfig
from topkv.config.layers import show_ranges
from topkv.errors import ConfigError, PluginError
from topkv.plugins import registry
from topkv_authoring.tested import never_tested


def examined(
    model: Path,
    length: int | None,
    settings: Path | None,
    algorithm: str | None,
    backend: str | None,
) -> dict[str, Any]:
    """Return the report of the engine of Transformers on a checkpoint, fit for JSON.

    Args:
        model: the folder of ``config.json``.
        length: tokens of a request; None for what the engine takes.
        settings: a file of ``SparseConfig``.
        algorithm, backend: beat what the file says; with neither nor a file, no bytes are
            reported.

    Raises:
        PluginError: topkv-transformers is not installed.
        ConfigError: the configuration of the model, or the file, cannot be used.
    """
    try:
        from topkv_transformers.engine import PACKAGES
        from topkv_transformers.examine import examine
    except ImportError as error:
        raise PluginError(
            "doctor cannot look at a model",
            [f"{error}; pip install 'topkv-cli[models]', which brings topkv-transformers"],
        ) from error
    chosen = None
    if settings or algorithm or backend:
        read = SparseConfig.load(settings or {})
        chosen = evolve(
            read, algorithm=algorithm or read.algorithm, backend=backend or read.backend
        )
    try:
        found = examine(model, chosen, length, registry())
    except (OSError, ValueError) as error:
        why = str(error)
        if "trust_remote_code" in why:  # Transformers names its own argument, and there is none
            why = "its configuration is code in Python, and doctor runs no code of a model"
        raise ConfigError(f"doctor cannot look at {model}", [why]) from error
    layers = {
        kind: show_ranges([at for at, each in enumerate(found.layers) if each == kind])
        for kind in dict.fromkeys(found.layers)
    }
    reported = {"class": found.model, "group": found.group, "attaches": not found.refused}
    reported |= {"refused": list(found.refused), "generate_refuses": list(found.options)}
    reported |= {"never_tested": [each for name in PACKAGES for each in never_tested(name)]}
    reported |= {"layers": layers, "length": found.length, "positions": found.positions}
    reported |= {f"{tier}_bytes": size for tier, size in found.bytes.items()}
    return {**reported, "not_counted": list(found.not_counted)}
