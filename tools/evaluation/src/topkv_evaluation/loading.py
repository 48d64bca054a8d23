"""Models and tokenizers from local directories. Code in them runs only if the user allows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from topkv.errors import CapabilityError, ConfigError
from topkv_transformers.support import refusals

CODE = (
    "it needs Python code that comes with it, and such code is not run unless you allow it; "
    "read the code, and if you trust it pass --trust-remote-code"
)


DTYPES = ("auto", "float16", "bfloat16", "float32")
"""Names of dtypes; auto is the checkpoint's dtype."""


def dtype_of(name: str) -> torch.dtype | str:
    """Return the dtype of a name, or "auto" for Transformers to look it up."""
    return name if name == "auto" else getattr(torch, name)


MOST = 8
"""Most weights that a refusal names, about those of a layer. The others are alike."""


def load_model(
    folder: Path, *, dtype: torch.dtype | str = "auto", trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load the model of a local directory, on the CPU.

    Args:
        folder: directory with configuration, and all weights that the configuration asks for.
        dtype: dtype of the weights; "auto" is the checkpoint's.
        trust_remote_code: True if Python code that the directory names may run.

    Raises:
        ConfigError: there is no such directory, no model in it can be loaded, its weights are not
            those that the configuration asks for, or it needs code that may not run.
    """
    with _loading("model", folder, trust_remote_code):
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            # Transformers would fill in random weights, or log the shapes where nobody looks.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    reasons = [
        f"{name}: expected {list(wanted)} by config.json, got {list(got)}"
        for name, got, wanted in sorted(found["mismatched_keys"])
    ]
    reasons += [
        f"{name}: expected by config.json, missing" for name in sorted(found["missing_keys"])
    ]
    if len(reasons) > MOST:
        reasons[MOST:] = [f"and {len(reasons) - MOST} more"]
    if reasons:
        raise ConfigError(f"the weights in {folder} are not those of its config.json", reasons)
    return model


def load_served(
    folder: Path, device: str, *, dtype: str = "auto", trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a model that topkv attaches to, on its device; errors as of ``load_model``, and more.

    Args:
        folder, trust_remote_code: as for ``load_model``.
        device: where it is to run.
        dtype: one of ``DTYPES``.

    Raises:
        CapabilityError: the model cannot be attached.
    """
    model = load_model(folder, dtype=dtype_of(dtype), trust_remote_code=trust_remote_code)
    reasons = refusals(model)
    if reasons:
        raise CapabilityError(f"{type(model).__name__} cannot be attached", reasons)
    return model.to(device).eval()


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a local directory; arguments and errors as of ``load_model``."""
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
    except Exception as error:
        # Bad files raise anything: SafetensorError, KeyError, Exception. Code that may not run has
        # no type either; the text names the argument that allows it.
        needs_code = not trusted and "trust_remote_code" in str(error)
        reason = CODE if needs_code else f"{type(error).__name__}: {error}"
        raise ConfigError(refused, [reason]) from error
