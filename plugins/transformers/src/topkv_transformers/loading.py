"""Models and tokenizers from local directories. Code in them runs only if the user allows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from topkv.errors import ConfigError

CODE = (
    "it needs Python code that comes with it, and such code is not run unless you allow it; "
    "read the code, and if you trust it pass --trust-remote-code"
)


def load_model(
    folder: Path, *, dtype: torch.dtype | str = "auto", trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model of a local directory, on the CPU.

    Args:
        folder: with configuration and weights.
        dtype: of the weights; "auto" is that of the checkpoint.
        trust_remote_code: whether Python code that the directory names may run.

    Raises:
        ConfigError: there is no such directory, no model in it can be loaded, or it needs code
            that may not run.
    """
    with _loading("model", folder, trust_remote_code):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=trust_remote_code
        )
    return model


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a local directory; arguments and errors as of ``load_model``."""
    with _loading("tokenizer", folder, trust_remote_code):
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )


@contextmanager
def _loading(what: str, folder: Path, trusted: bool) -> Iterator[None]:
    refused = f"no {what} can be loaded from {folder}"
    if not folder.is_dir():
        raise ConfigError(refused, ["there is no such directory; --model expects a local one"])
    try:
        yield
    except (OSError, ValueError) as error:
        # Transformers has no type for this refusal; it names the argument that allows code.
        needs_code = not trusted and "trust_remote_code" in str(error)
        raise ConfigError(refused, [CODE if needs_code else str(error)]) from error
