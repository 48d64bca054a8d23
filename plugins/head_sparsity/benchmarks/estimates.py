"""Error of the entropy of attention estimated from less than the keys, on real keys, on a CPU.

    python plugins/head_sparsity/benchmarks/estimates.py --out FILE

The small checkpoint of topkv-evaluation reads three prompts of 4096 bytes with planted facts and a
question. Of the last ``ROWS`` rows, in layers 2 to 5, the entropy of attention over units of
16 tokens, over its maximum, is compared with estimates of it: by means of runs of N
tokens, as they are (``bits`` 0) or in 4 bits; from all units, or from a tenth of them, those of
the best keys, as candidates, and a sample of N units beside them, or from the sample
alone. ``correlation`` and ``error``, the mean absolute one, are over rows, query heads, layers
and prompts.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from topkv_evaluation import CHECKPOINT
from topkv_evaluation.retrieval import make_prompt
from topkv_head_sparsity import reference

ROWS, UNIT, DENSE, PROMPTS = 24, 16, 2, 3
SAMPLES = ((None, True), (64, True), (32, True), (64, False))
"""Units of the sample, None for all, and whether there are candidates beside it."""


def activations() -> list[tuple[Tensor, Tensor]]:
    """Post-RoPE queries ``[Hkv, G, ROWS, D]``, scaled, and keys ``[Hkv, n, D]`` before them."""
    kept = []

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **other: Any):
        if module.layer_idx >= DENSE:
            q, count = query[0, :, -ROWS:], (key.shape[2] - ROWS) // UNIT * UNIT
            kept.append((q.unflatten(0, (key.shape[1], -1)) * module.scaling, key[0, :, :count]))
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return out.transpose(1, 2), None

    AttentionInterface.register("spy", attend)
    model = AutoModelForCausalLM.from_pretrained(
        CHECKPOINT, dtype=torch.float32, attn_implementation="spy"
    )
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    for seed in range(PROMPTS):
        prompt = make_prompt(4096, seed=1000 + seed)
        text = tokenizer(prompt.text + prompt.expected[:3], return_tensors="pt")
        with torch.inference_mode():
            model(**text)
    return kept


def worth_of(q: Tensor, k: Tensor, run: int, bits: int) -> Tensor:
    """Worth of units by means of runs, ``[Hkv, G, ROWS, n / UNIT]``."""
    means = k.unflatten(1, (-1, run)).mean(2)
    if bits:
        means = reference.decode(*reference.encode(means), k.shape[-1])
    logits = torch.einsum("hgtd,hrd->hgtr", q, means) + math.log(run)
    return logits.unflatten(-1, (-1, UNIT // run)).logsumexp(-1)


def flatness(worth: Tensor, best: Tensor, size: int | None, offered: bool) -> Tensor:
    """Flatness of each query head and row, by a sample and by candidates, where there are some."""
    units = worth.shape[-1]
    nth = torch.arange(size or units)
    sampled = torch.zeros(units, dtype=torch.bool)
    sampled[(2 * nth + 1) * units // (2 * len(nth))] = True
    known = best if offered else torch.zeros_like(best)
    others = (sampled & ~known).expand_as(worth)
    each = (units - known.sum(-1, keepdim=True)) / others.sum(-1, keepdim=True).clamp(min=1)
    weights = known + each * others
    below = worth - worth.masked_fill(weights == 0, -torch.inf).amax(-1, keepdim=True)
    mass = weights * below.clamp(max=0).exp()
    whole = mass.sum(-1)
    return (whole.log() - (mass * below.clamp(max=0)).sum(-1) / whole) / math.log(units)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write JSON lines here as well")
    reported, truth = defaultdict[tuple[Any, ...], list[Tensor]](list), []
    options = parser.parse_args()
    for q, k in activations():
        exact = worth_of(q, k, 1, 0)
        units = exact.shape[-1]
        lanes = exact.log_softmax(-1).logsumexp(1, keepdim=True)
        chosen = lanes.topk(units // 10, -1).indices
        best = torch.zeros_like(lanes, dtype=torch.bool).scatter(-1, chosen, True)
        best = best.expand_as(exact)
        truth.append(flatness(exact, best, None, False).flatten())
        for run, bits in product((1, 2, 4, 8, 16), (0, 4)):
            worth = worth_of(q, k, run, bits)
            for sample in SAMPLES if (run, bits) == (4, 4) else SAMPLES[:1]:
                reported[run, bits, *sample].append(flatness(worth, best, *sample).flatten())
    for (run, bits, size, offered), found in reported.items():
        both = torch.stack([torch.cat(found), torch.cat(truth)]).double()
        row = {"run": run, "bits": bits, "sample": size, "candidates": offered}
        row["correlation"] = round(torch.corrcoef(both)[0, 1].item(), 3)
        row["error"] = round((both[0] - both[1]).abs().mean().item(), 4)
        print(line := json.dumps(row), flush=True)
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
