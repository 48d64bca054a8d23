"""Model of the training, its forward pass without masks, and its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from byte_tokenizer import PAD_ID, build_byte_tokenizer
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, PreTrainedModel
from transformers import LlamaForCausalLM as LlamaForCausalLM

ModelT = TypeVar("ModelT", bound=PreTrainedModel)
Layers = Sequence[Callable[..., Tensor]]


def retrieval_config(max_length: int, *, tiny: bool = False) -> LlamaConfig:
    """A byte-level Llama of 5.57 million parameters; of a few thousand if ``tiny``."""
    sizes = (
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64}
        if tiny
        else {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8}
        | {"num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 768}
    )
    return LlamaConfig(
        **sizes,
        vocab_size=256,
        max_position_embeddings=max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=PAD_ID,
        attn_implementation="sdpa",
    )


def causal_logits(model: PreTrainedModel, tokens: Tensor, layers: Layers | None = None) -> Tensor:
    """Return logits [B, n, 256] of full causal attention over ``tokens`` [B, n] without padding.

    Equals ``model(tokens).logits``, without the look for packed sequences, which would wait
    for the device in every step. Under autocast the rotary angles are rounded to its dtype, as
    they are in the saved model.

    Args:
        layers: stand-ins for the model's decoder layers, compiled ones for instance.
    """
    core = model.model
    hidden = core.embed_tokens(tokens)
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    cos, sin = core.rotary_emb(hidden, position_ids=positions)
    if torch.is_autocast_enabled(tokens.device.type):
        dtype = torch.get_autocast_dtype(tokens.device.type)
        cos, sin = cos.to(dtype), sin.to(dtype)
    for layer in core.layers if layers is None else layers:
        hidden = layer(
            hidden,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=(cos, sin),
            use_cache=False,
        )
    return model.lm_head(core.norm(hidden))


def save_checkpoint(model: ModelT, folder: Path) -> ModelT:
    """Write weights in bfloat16, configuration and tokenizer; return the model as read back."""
    length = model.config.max_position_embeddings
    folder.mkdir(parents=True, exist_ok=True)
    device = next(model.parameters()).device
    copy = type(model)(model.config).to(device)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16)
    copy.generation_config = GenerationConfig(
        pad_token_id=PAD_ID, eos_token_id=None, bos_token_id=None, do_sample=False
    )
    copy.save_pretrained(folder)
    _drop_layer_types(folder / "config.json")
    build_byte_tokenizer(length).save_pretrained(folder)
    saved = type(model).from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
    return saved.to(device).eval()


def _drop_layer_types(path: Path) -> None:
    """Drop types of equal layers, which versions of Transformers name differently."""
    values = json.loads(path.read_text())
    if len({*values.get("layer_types", ())}) == 1:
        del values["layer_types"]
        path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
