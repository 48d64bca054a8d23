"""A tiny random model of each class that is served.

Sizes differ from class to class, and so does whether the head is the embedding, so that over all
of them many geometries are met: three query heads for a kv-head, or one, or five; hidden sizes
that are not heads times head dim, where a class allows that.
"""

from __future__ import annotations

import pytest
import torch
import transformers

from topkv_transformers.classes import CLASSES

PAD, VOCABULARY = 0, 96

SIZES = ((6, 2, 64), (3, 1, 96), (4, 4, 64), (5, 1, 64), (4, 2, 96))
"""Query heads, kv-heads, head dim: one after the other, over the classes of a group."""

EXAMPLES = {"Granite", "Qwen3Moe", "Gemma3", "GptOss", "Gemma2", "Qwen3Next", "DeepseekV3"}
"""One of each group, which is tested wherever tests run."""

CONTRARY = {"Jamba", "NemotronH"}
"""Classes whose stock models give other logits for a sequence at once than in decode, or in
chunks: nothing but the stock model in the same calls says what is right."""

# Hidden size is heads times head dim.
TIGHT = {
    *("Arcee", "AriaText", "BitNet", "Helium", "HyperCLOVAX", "Jais2", "Llama", "Olmoe"),
    *("StableLm", "Emu3", "Olmo", "Olmo2", "FlexOlmo", "Phi", "Nemotron"),
}

SLIDING = ["sliding_attention", "full_attention"] * 2

EXPERTS = {
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
"""Options of experts, by the names that the classes have for them."""

LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

MAMBA = {
    "mamba_d_state": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "hidden_size": 384,
}

MLA = {
    "q_lora_rank": 24,
    "kv_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 24,
    "v_head_dim": 16,
}
"""Options of latent attention. Some classes take queries without a latent, values wider than
keys, or another RoPE."""

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "mscale_all_dim": 1.0}
YARN |= {"mscale": 1.0, "original_max_position_embeddings": 20}

GROWING = {**YARN, "llama_4_scaling_beta": 0.7}
"""Options with which queries grow with their position."""

CONV = {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 2}

EAGER = {"query_pre_attn_scalar": 16, "attn_implementation": "eager"}
"""Options with which alone the stock model caps; that of 5.17 takes sdpa by itself, which does
not."""

OWN = {
    "Gemma2": {"attn_logit_softcapping": 1.5, **EAGER},
    "VaultGemma": {"attn_logit_softcapping": 1.5, **EAGER},
    "Bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "GraniteMoeHybrid": {
        **MAMBA,
        "layer_types": ["mamba", "attention"] * 2,
        "attention_multiplier": 0.11,
    },
    "Jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "Lfm2": CONV,
    "Lfm2Moe": CONV,
    "NemotronH": {"layers_block_type": ["mamba", "attention", "moe", "attention"]},
    "OlmoHybrid": LINEAR,
    "Qwen3Next": LINEAR,
    "Qwen3_5": LINEAR,
    "Qwen3_5Moe": LINEAR,
    "DeepseekV3": {"rope_interleave": False, "q_lora_rank": None},
    "Glm4MoeLite": {"rope_parameters": YARN, "v_head_dim": 32},
    "Mistral4": {"rope_parameters": GROWING},
    "Youtu": {"q_lora_rank": None},
    "GraniteSWA": {"attention_multiplier": 0.11},
    "GraniteMoeSWA": {"attention_multiplier": 0.11},
    "Granite": {"attention_multiplier": 0.11},
    "GraniteMoe": {"attention_multiplier": 0.11},
    "GraniteMoeShared": {"attention_multiplier": 0.11},
    "Jais2": {"attention_bias": True},
    "Mistral": {"sliding_window": None},
    "Mellum": {"sliding_window": 7},
    "Qwen2Moe": {"sliding_window": 7},
}
"""Options that one class alone needs, or that make it harder."""


def names_of(*groups):
    """The classes of some groups, each a parameter of a test.

    All but the examples are marked ``models``, and are left to ``make test-models``.
    """
    return [pytest.param(name, marks=_marks(name)) for group in groups for name in CLASSES[group]]


def _marks(name):
    known = hasattr(transformers, f"{name}ForCausalLM")
    absent = pytest.mark.skipif(not known, reason="this release of Transformers lacks the class")
    return [absent] if name in EXAMPLES else [absent, pytest.mark.models]


def config_of(name, **options):
    """The configuration of a tiny model of a class."""
    group = next(group for group, names in CLASSES.items() if name in names)
    place = CLASSES[group].index(name)
    heads, kv_heads, head_dim = SIZES[place % len(SIZES)]
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": heads * head_dim if name in TIGHT else 60 * heads,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 640,
        "initializer_range": 0.15,
        "tie_word_embeddings": bool(place % 2),
        "pad_token_id": PAD,
        "bos_token_id": 1,
        "eos_token_id": None,
        **({} if group == "dense" else EXPERTS),
    }
    if group == "latent":
        values |= {**MLA, "num_key_value_heads": heads}
        del values["head_dim"]
    if group == "blocks":
        sizes = {"index_n_heads": kv_heads, "index_head_dim": 24, "rotary_dim": 16}
        values |= {"num_hidden_layers": 4, "dense_intermediate_size": 96, **sizes}
    if group in ("windows", "sinks", "softcap", "states"):
        values |= {"num_hidden_layers": 4}
    if group in ("windows", "sinks", "softcap"):
        values |= {"layer_types": SLIDING, "sliding_window": 9}
    kind = getattr(transformers, f"{name}ForCausalLM").config_class
    return kind(**{**values, **OWN.get(name, {}), **options})


def model_of(name, device="cpu", **options):
    """A tiny random model of a class."""
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}ForCausalLM")
    model = kind(config_of(name, **options)).eval()
    for each, parameter in model.named_parameters():
        if each.endswith("sinks"):  # some heads go to nothing else, some hardly notice
            parameter.data.copy_(torch.linspace(-4, 4, len(parameter)))
    return model.to(device)
