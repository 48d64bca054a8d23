"""Tiny random models in float32 whose layers are not all alike, and drafters.

They are saved without a tokenizer, for ``skip_tokenizer_init=True``.
"""

from __future__ import annotations

import json

import torch

WINDOW = 64

SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.2,  # attention that is far from uniform
}


def save(path, model):
    """Save a model; return the folder."""
    model.float().save_pretrained(path)
    return str(path)


def gemma3(path):
    """Save windows and full attention 2 to 1; it would repeat itself with tied embeddings."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        **SIZES,
        num_hidden_layers=6,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=64,
        tie_word_embeddings=False,
    )
    return save(path, Gemma3ForCausalLM(config))


def gpt_oss(path):
    """Save windows and full attention 1 to 1, both with sinks, and experts."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    config = GptOssConfig(
        **SIZES,
        num_hidden_layers=4,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    )
    model = GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return save(path, model)


def llama(path, layers=3, seed=0, **changes):
    """Save layers that all attend to everything."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return save(path, LlamaForCausalLM(LlamaConfig(**SIZES | changes, num_hidden_layers=layers)))


def eagle(path):
    """Save a drafter of one layer: it reads an embedding and a hidden state."""
    weights = _layer_of(path)
    del weights["layers.0.input_layernorm.weight"]
    return _drafter(path, weights | {"fc.weight": torch.randn(256, 512) * 0.05})


def eagle3(path):
    """Save a drafter of one layer, which reads hidden states of three layers."""
    weights = {
        name.replace("layers.0", "midlayer"): each for name, each in _layer_of(path).items()
    }
    for name in ("q_proj", "k_proj", "v_proj"):
        own = f"midlayer.self_attn.{name}.weight"
        weights[own] = torch.cat([weights[own]] * 2, dim=1)
    ones = {name: torch.ones(256) for name in ("midlayer.hidden_norm.weight", "norm.weight")}
    head = {"lm_head.weight": torch.randn(512, 256) * 0.2}
    more = {"fc.weight": torch.randn(256, 768) * 0.05, **ones, **head}
    reads = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    return _drafter(path, weights | more, architectures=["LlamaForCausalLMEagle3"], **reads)


def mimo(path):
    """Save layers that all attend to everything, and a layer that drafts (MTP)."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape = {**SIZES, "num_hidden_layers": 3, "tie_word_embeddings": False}
    model = Qwen2ForCausalLM(Qwen2Config(**shape)).float()
    last = model.model.layers[2].state_dict()
    ones = dict.fromkeys(
        ("token_layernorm", "hidden_layernorm", "final_layernorm"), torch.ones(256)
    )
    more = {f"{name}.weight": each for name, each in ones.items()}
    more["input_proj.weight"] = torch.randn(256, 512) * 0.05
    drafter = {f"model.mtp_layers.0.{name}": each.clone() for name, each in (last | more).items()}
    save(path, model)
    changes = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    return _drafter(path, model.state_dict() | drafter, **changes)


def glm4_moe(path):
    """Save layers of experts that all attend to everything, and one more that drafts (MTP)."""
    from safetensors.torch import load_file
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    torch.manual_seed(0)
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    shape = {**SIZES, **experts, "first_k_dense_replace": 1, "tie_word_embeddings": False}
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**shape, num_hidden_layers=3)).float()
    save(path, model)
    weights = load_file(path / "model.safetensors")
    layer = "model.layers.2."
    drafter = {
        name.replace(layer, "model.layers.3."): weight.clone()
        for name, weight in weights.items()
        if name.startswith(layer)
    }
    for name in ("enorm", "hnorm", "shared_head.norm"):
        drafter[f"model.layers.3.{name}.weight"] = torch.ones(256)
    drafter["model.layers.3.eh_proj.weight"] = torch.randn(256, 512) * 0.05
    for name, whole in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        drafter[f"model.layers.3.{name}.weight"] = weights[f"{whole}.weight"].clone()
    return _drafter(path, weights | drafter, num_nextn_predict_layers=1)


def _layer_of(path):
    """Weights of the layer of a saved model."""
    from transformers import LlamaForCausalLM

    layers = LlamaForCausalLM.from_pretrained(llama(path, 1, seed=3)).model.layers
    return {f"layers.{name}": weight for name, weight in layers.state_dict().items()}


def _drafter(path, weights, **changes):
    """Save other weights in place of a model's."""
    from safetensors.torch import save_file

    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return str(path)
