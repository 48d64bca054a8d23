"""LoRA adapters for the tiny models of the engines' tests."""

from __future__ import annotations

import json


def save_adapter(seed, tmp_path_factory, layers=2):
    """Save an adapter of the projections of queries, keys and values; its folder."""
    import torch
    from safetensors.torch import save_file

    random, rank, weights = torch.Generator().manual_seed(seed), 8, {}
    for layer in range(layers):
        for name, size in (("q_proj", 256), ("k_proj", 128), ("v_proj", 128)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(rank, 256, generator=random) * 0.2
            weights[f"{place}.lora_B.weight"] = torch.randn(size, rank, generator=random) * 4
    path = tmp_path_factory.mktemp("lora")
    save_file(weights, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj", "k_proj", "v_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path
