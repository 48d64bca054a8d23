"""A Llama of a GGUF file as a checkpoint of Transformers, with its tokenizer.

Transformers' own GGUF loader gives the same logits, and cannot save what it has loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of a layer's tensors in Transformers, by their names in GGUF."""

TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
"""Names of tensors outside of layers in Transformers, by their names in GGUF."""

CONTROL = 3
"""Type of tokens such as the end of a text, in ``tokenizer.ggml.token_type``."""


def name_of(tensor: str) -> str:
    """Return the name in Transformers of a tensor in a GGUF file."""
    if tensor in TOP:
        return TOP[tensor]
    _, layer, kind, _ = tensor.split(".")
    return f"model.layers.{layer}.{LAYER[kind]}.weight"


def halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return rows of a projection ``[heads * D, columns]`` in the order of Transformers.

    llama.cpp interleaves the two halves of the channels that a head rotates; Transformers lays one
    behind the other.
    """
    rows, columns = weight.shape
    parts = weight.reshape(heads, rows // heads // 2, 2, columns)
    return parts.swapaxes(1, 2).reshape(rows, columns)


def convert(path: Path, folder: Path) -> None:
    """Write a checkpoint with float32 weights and its tokenizer.

    Args:
        path: GGUF file of a Llama, weights in any of its formats, and a byte-level BPE tokenizer.
        folder: folder to make.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize

    folder.mkdir(parents=True)
    reader = GGUFReader(path)
    values = {key: field.contents() for key, field in reader.fields.items()}
    heads = {
        "attn_q": values["llama.attention.head_count"],
        "attn_k": values["llama.attention.head_count_kv"],
    }
    tensors = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        for kind, number in heads.items():
            if f".{kind}." in tensor.name:
                weight = halves(weight, number)
        tensors[name_of(tensor.name)] = torch.tensor(weight, dtype=torch.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = config_of(values, tied="lm_head.weight" not in tensors)
    config.save_pretrained(folder)
    tokenizer_of(values, config).save_pretrained(folder)


def config_of(values: dict[str, Any], tied: bool) -> LlamaConfig:
    """Make the configuration from the fields of a GGUF file."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=values["llama.vocab_size"],
        hidden_size=values["llama.embedding_length"],
        intermediate_size=values["llama.feed_forward_length"],
        num_hidden_layers=values["llama.block_count"],
        num_attention_heads=values["llama.attention.head_count"],
        num_key_value_heads=values["llama.attention.head_count_kv"],
        head_dim=values["llama.rope.dimension_count"],
        max_position_embeddings=values["llama.context_length"],
        rms_norm_eps=float(f"{values['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": values["llama.rope.freq_base"]},
        tie_word_embeddings=tied,
        bos_token_id=values["tokenizer.ggml.bos_token_id"],
        eos_token_id=values["tokenizer.ggml.eos_token_id"],
        pad_token_id=values["tokenizer.ggml.padding_token_id"],
    )


def tokenizer_of(values: dict[str, Any], config: LlamaConfig) -> PreTrainedTokenizerFast:
    """Make the tokenizer of a GGUF file, with single digits as SmolLM2's."""
    words, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    ids = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(ids, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(word, normalized=False, special=True)
            for word, kind in zip(words, kinds, strict=True)
            if kind == CONTROL
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=words[config.bos_token_id],
        eos_token=words[config.eos_token_id],
        pad_token=words[config.pad_token_id],
        unk_token=words[values["tokenizer.ggml.unknown_token_id"]],
        chat_template=values["tokenizer.chat_template"],
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
