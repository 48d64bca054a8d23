"""Answers of a model whose keys have large biases, as Qwen2's do, beside the model without.

    python benchmarks/large_biases.py --prompts 32 --out benchmarks/results/large_biases.jsonl

For every kv-head of the shipped model one pair of channels that RoPE turns slowly is taken away
from the queries and gets a bias in the keys: dense attention stays as it is but for rounding, and
so should every selection. ``one`` puts the same bias into the slowest pair of all; ``random``
draws, for each layer and kv-head, one of the four slowest, and sizes and signs as Qwen2's vary
(log-normal).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import topkv
from topkv_evaluation import CHECKPOINT
from topkv_evaluation.retrieval import make_prompt

TOKENS, BUDGET = 1536, 160
SETTINGS: dict[str, dict[str, Any]] = {
    "pariskv": {"algorithm": "pariskv"},
    "pariskv+top_p": {"algorithm": "pariskv", "stages": ["top_p"]},
    "double_sparsity": {"algorithm": "double_sparsity"},
    "double_sparsity+top_p": {"algorithm": "double_sparsity", "stages": ["top_p"]},
    "quest": {"algorithm": "quest"},
    "quest, fp8 on the host": {"algorithm": "quest", "host_format": "fp8"},
}
KINDS = ("one:0", "one:300", "random:0", "random:100")
"""Kind of pairs, and size of the bias: the median for ``random``."""


def biased(kind: str) -> PreTrainedModel:
    """The shipped model in float32 with biases of its keys; see above."""
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    config, (where, size) = model.config, kind.split(":")
    heads, kv_heads, dim = (
        config.num_attention_heads, config.num_key_value_heads, config.head_dim
    )  # fmt: skip
    draws = torch.Generator().manual_seed(7)
    for layer in model.model.layers:
        bias = torch.zeros(kv_heads, dim)
        for head in range(kv_heads):
            slow = 0 if where == "one" else int(torch.randint(0, 4, (1,), generator=draws))
            pair = [dim // 2 - 1 - slow, dim - 1 - slow]
            spread, sign = torch.randn(2, 2, generator=draws).exp(), torch.tensor([1.0, -0.7])
            if where == "random":
                sign = spread[0] * torch.sign(spread[1] - 1)
            bias[head, pair] = float(size) * sign
            group = range(head * heads // kv_heads, (head + 1) * heads // kv_heads)
            rows = [each * dim + channel for each in group for channel in pair]
            layer.self_attn.q_proj.weight.data[rows] = 0
        layer.self_attn.k_proj.bias = torch.nn.Parameter(bias.flatten())
    return model


def right(model: PreTrainedModel, prompts: list[Any], tokenizer: Any) -> int:
    """Number of prompts that are answered rightly."""
    found = 0
    for prompt in prompts:
        given = tokenizer(prompt.text, return_tensors="pt")
        out = model.generate(**given, max_new_tokens=5, do_sample=False)
        found += tokenizer.decode(out[0, -5:]) == prompt.expected
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--first", type=int, default=0, help="seed of the first prompt")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    prompts = [make_prompt(TOKENS, seed=args.first + i) for i in range(args.prompts)]
    for kind in KINDS:
        model = biased(kind)
        row = {"bias": kind, "prompts": len(prompts), "stock": right(model, prompts, tokenizer)}
        for name, settings in SETTINGS.items():
            whole = {**settings, "backend": "triton_attention", "budget": BUDGET}
            whole |= {"dense_layers": [], "max_tokens": 2048, "max_requests": 1}
            with topkv.attach(model, whole):
                row[name] = right(model, prompts, tokenizer)
        line = json.dumps(row)
        print(line, flush=True)
        if args.out:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
