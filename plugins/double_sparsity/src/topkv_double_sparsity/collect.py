"""Statistics of the post-RoPE activations of a Transformers model.

Queries and keys are taken where the model hands them to its attention function: after RoPE, and
after whatever else a model does to them, in every model that Transformers dispatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from topkv.errors import CapabilityError, ConfigError
from topkv_double_sparsity.calibration import Rows
from topkv_double_sparsity.statistics import Moments

NAME = "topkv_calibrate"

CODE = (
    "it needs Python code that comes with it, and such code is not run unless you allow it; "
    "read the code, and if you trust it pass --trust-remote-code"
)


def load(
    directory: Path, device: str, *, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, Any]:
    """Model and tokenizer from a local directory.

    Args:
        directory: with configuration, weights and tokenizer.
        device: for the model.
        trust_remote_code: whether Python code that the directory names may run.

    Raises:
        ConfigError: there is none, it cannot be loaded, or it needs code that may not run.
    """
    what, reasons = f"no model can be loaded from {directory}", []
    if not directory.is_dir():
        raise ConfigError(what, ["there is no such directory; --model expects a local one"])
    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        # Transformers would fill in random weights where shapes differ or weights are missing.
        seen = {"ignore_mismatched_sizes": True, "output_loading_info": True}
        model, found = AutoModelForCausalLM.from_pretrained(
            directory, dtype="auto", **options, **seen
        )
        reasons = _weight_reasons(found)
        what = f"no tokenizer can be loaded from {directory}"
        tokenizer = AutoTokenizer.from_pretrained(directory, **options)
        what = f"the model cannot be put on device {device!r}"
        model = model.to(device).eval()
    except Exception as error:
        # Bad files raise anything: SafetensorError, KeyError, Exception. Code that may not run has
        # no type either; the text names the argument that allows it.
        needs_code = not trust_remote_code and "trust_remote_code" in str(error)
        reason = CODE if needs_code else f"{type(error).__name__}: {error}"
        raise ConfigError(what, [reason]) from error
    if reasons:
        what = f"the weights in {directory} are not those of its config.json"
        raise ConfigError(what, reasons)
    return model, tokenizer


def _weight_reasons(found: dict[str, Any]) -> list[str]:
    reasons = [
        f"{name}: expected {list(wanted)} by config.json, got {list(got)}"
        for name, got, wanted in sorted(found["mismatched_keys"])
    ]
    reasons += [
        f"{name}: expected by config.json, missing" for name in sorted(found["missing_keys"])
    ]
    most = 8  # of a layer or so; the others are alike
    return reasons[:most] + ([f"and {len(reasons) - most} more"] if len(reasons) > most else [])


def blocks_of(tokens: Tensor, block: int, samples: int) -> list[Tensor]:
    """Cut out at most ``samples`` blocks of ``block`` tokens, spread evenly over ``tokens [n]``.

    The last block of the text may be shorter.
    """
    every = list(tokens.split(block))
    if len(every) <= samples:
        return every
    return [every[i * len(every) // samples] for i in range(samples)]


@contextmanager
def _watched(model: PreTrainedModel, moments: dict[int, Moments]) -> Iterator[None]:
    """Let every attention of the model add its queries and keys to ``moments``."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        layer = getattr(module, "layer_idx", None)
        if layer is None:
            raise CapabilityError(
                f"{type(model).__name__} cannot be calibrated",
                [f"its {type(module).__name__} does not say which layer it is (layer_idx)"],
            )
        heads, dim = key.shape[1], key.shape[3]
        mine = moments.setdefault(layer, Moments(heads, dim, key.device))
        for q, k in zip(query, key, strict=True):
            mine.add(q.transpose(0, 1), k.transpose(0, 1))
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


@torch.no_grad()
def moments_of(model: PreTrainedModel, blocks: list[Tensor]) -> dict[int, Moments]:
    """Moments by layer over all blocks, each a sequence of its own that starts at position 0.

    Args:
        model: a decoder that dispatches its attention through Transformers.
        blocks: int64 ``[m]`` token ids each.

    Raises:
        CapabilityError: the model's attention does not pass through Transformers' interface.
    """
    moments: dict[int, Moments] = {}
    with _watched(model, moments):
        for tokens in blocks:
            model.base_model(input_ids=tokens[None].to(model.device), use_cache=False)
    layers = model.config.get_text_config().num_hidden_layers
    if not moments:
        raise CapabilityError(
            f"{type(model).__name__} cannot be calibrated",
            [f"none of its {layers} layers calls Transformers' attention interface"],
        )
    return moments


def importance_of(
    model: PreTrainedModel, blocks: list[Tensor]
) -> tuple[dict[int, Rows], dict[int, list[Rows]]]:
    """Importance by layer, ``[Hkv][D]``, and ranges, as a calibration file holds them.

    Raises:
        CapabilityError: the model does not let its activations be seen, or they are not finite.
    """
    moments = moments_of(model, blocks)
    values = {layer: each.importance() for layer, each in moments.items()}
    ranges = {n: [each.low_k.tolist(), each.high_k.tolist()] for n, each in moments.items()}
    bad = sorted(layer for layer, value in values.items() if not value.isfinite().all())
    if bad:
        raise CapabilityError(
            f"{type(model).__name__} cannot be calibrated",
            [f"the statistics of layers {bad} are not finite; load it in another dtype"],
        )
    return {layer: values[layer].tolist() for layer in sorted(values)}, ranges
