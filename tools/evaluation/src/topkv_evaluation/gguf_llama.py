"""A Llama of a GGUF file as a checkpoint of Transformers, with its tokenizer.

Transformers' own GGUF loader reads the model, and cannot save what it has loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

CONTROL = 3
"""Type of tokens such as the end of a text, in ``tokenizer.ggml.token_type``."""


def convert(path: Path, folder: Path) -> None:
    """Write a checkpoint with float32 weights and its tokenizer.

    Args:
        path: GGUF file of a Llama, weights in any of its formats, and a byte-level BPE tokenizer.
        folder: folder to make.
    """
    from gguf import GGUFReader

    folder.mkdir(parents=True)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    stated, weights = model.config.to_dict(), model.state_dict()
    for name in ("quantization_config", "unk_token_id"):
        stated.pop(name, None)  # of the file, and of the tokenizer
    # GGUF has it in float32, where 1e-5 is 9.99999974e-6.
    stated["rms_norm_eps"] = float(f"{stated['rms_norm_eps']:.6g}")
    config = LlamaConfig(**stated | {"architectures": [type(model).__name__]})
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]  # which is that of the embeddings
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    values = {key: field.contents() for key, field in GGUFReader(path).fields.items()}
    tokenizer_of(values, config).save_pretrained(folder)


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
