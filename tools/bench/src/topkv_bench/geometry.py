"""Models of random weights: of a named geometry, or of a ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from topkv.errors import ConfigError

_LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
_QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
}
_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
}
# All else is as the class has it: every other layer slides over 128 tokens, and all have sinks.
_GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
}
_TINY = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 256,
    "max_position_embeddings": 8192,
}
GEOMETRIES: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": _LLAMA,
    "qwen3-8b": _QWEN3,
    "qwen3-30b-a3b": _QWEN3_MOE,
    "gpt-oss-20b": _GPT_OSS,
    "tiny": _TINY,
}
"""Shapes by name, from ``config.json`` of each model. Frequencies of Llama's positions are not
stretched, which costs nothing and changes no time."""

_DROPPED = ("auto_map", "quantization_config", "torch_dtype", "dtype")
"""Keys that name code, or how the weights of the real model are kept."""


def config_of(name: str | None, path: Path | None, positions: int) -> PreTrainedConfig:
    """Return the configuration of a geometry.

    Args:
        name: one of ``GEOMETRIES``, or None.
        path: a ``config.json`` or the directory that holds one, where there is no name. Nothing
            is downloaded, and no code that it names is run.
        positions: positions that a request reaches; a model with fewer gets as many.

    Raises:
        ConfigError: the file is no configuration of a causal language model.
    """
    values = GEOMETRIES[name] if name is not None else _read(path or Path())
    values = {key: value for key, value in values.items() if key not in _DROPPED}
    head = f"no model can be made of {path}"
    try:
        config = AutoConfig.for_model(**values)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(head, [f"{type(error).__name__}: {error}"]) from error
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ConfigError(head, [f"model_type {config.model_type!r} is no causal language model"])
    text = config.get_text_config()
    text.max_position_embeddings = max(positions, text.max_position_embeddings or 0)
    return config


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    head = f"no model can be made of {path}"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            head, [f"expected a config.json or a directory that holds one: {error}"]
        ) from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise ConfigError(head, ["expected a JSON object with the key model_type of Transformers"])
    return values


def skeleton(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Make the modules of a model, without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def build(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Make a model of small normal weights on the device where it is to run.

    No token ends a text, so that every request generates as many as it was asked for.
    """
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval().requires_grad_(False)
