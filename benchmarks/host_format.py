"""Likelihood of text under the shipped model, with host entries plain and coded.

    python benchmarks/host_format.py --tokens 4096 --decoded 128 --device cpu

Two negative log-likelihoods of each format, in nats a token. ``prompt``: tokens of a document that
is read in chunks, each of which attends to all before it. ``decode``: the last tokens of the same
document, each a step, with Quest at each budget. Documents are those of ``topkv eval``.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import topkv
from topkv_evaluation import CHECKPOINT
from topkv_evaluation.eval.tasks import retrieval_task


@torch.inference_mode()
def likelihood(handle: Any, ids: torch.Tensor, prompt: int, chunk: int) -> list[float]:
    """Negative log-likelihood of each token but the first: chunks, then single tokens."""
    cache, found = handle.new_cache(), []
    ends = [*range(0, prompt, chunk), *range(prompt, ids.shape[1])]
    for first, last in pairwise(ends):
        logits = handle.model(ids[:, first:last], past_key_values=cache).logits[0]
        each = torch.log_softmax(logits.double(), -1)
        found += (-each.gather(1, ids[0, first + 1 : last + 1, None])[:, 0]).tolist()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--decoded", type=int, default=128)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    task = retrieval_task(options.tokens, options.documents, per_context=1)
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT).eval().to(options.device)
    prompt = options.tokens - options.decoded
    for budget in options.budgets:
        for host_format in ("model", "fp8"):
            began, reported = time.perf_counter(), []
            settings = {"algorithm": "quest", "backend": "triton_attention", "budget": budget}
            settings |= {"dense_layers": [], "max_tokens": options.tokens + 64, "max_requests": 1}
            with topkv.attach(model, {**settings, "host_format": host_format}) as handle:
                for context in task.contexts:
                    ids = torch.tensor([context], device=options.device)
                    reported.append(likelihood(handle, ids, prompt, 1024))
                host = handle.coordinator.memory().host
            every = torch.tensor(reported)
            row = {
                "budget": budget,
                "host_format": host_format,
                "dtype": str(model.dtype),
                "prompt": every[:, :prompt].mean().item(),
                "decode": every[:, prompt:].mean().item(),
                "tokens": [every[:, :prompt].numel(), every[:, prompt:].numel()],
                "host_bytes": host,
                "seconds": round(time.perf_counter() - began, 1),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
