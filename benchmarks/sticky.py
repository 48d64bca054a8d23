"""Misses and quality of sticky selection, with a trained model.

    python benchmarks/sticky.py --sticky 0 0.5 1 --out FILE

A small model that comes with topkv-evaluation reads prompts of ``--tokens`` tokens and decodes 288
tokens that are given (teacher-forced), of which the first 32 count for nothing. "text": the source
text that the prompt is from goes on. "ask": questions about facts of the prompt, one after the
other with their answers; an answer is right if each of its digits would have been the model's
choice. The buffer is twice the selection, and every layer attends to what it selected. A line for
each prompt and bonus, with ``misses`` in % of the selected units (units of the ring are hits) and
``nll`` in nats a token. "mean": over the prompts, ``nll_more`` beside the first bonus with the
standard error of its mean.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from topkv import attach
from topkv.config import SparseConfig
from topkv_evaluation import CHECKPOINT
from topkv_evaluation.eval.batches import fork_rows, read_contexts
from topkv_evaluation.retrieval import VALUE_DIGITS, ask, make_prompt, standard_library_text

STEPS, WARM, PAGE = 288, 32, 64


def document(task: str, tokens: int, seed: int) -> tuple[np.ndarray, list[int]]:
    """``[tokens + STEPS]`` tokens, and the steps whose token is the first digit of an answer."""
    if task == "text":
        text = standard_library_text("held_out")
        start = int(np.random.default_rng(seed).integers(len(text) - tokens - STEPS + 1))
        return text[start : start + tokens + STEPS], []
    # The question at the end of the prompt is cut off, and what is before it.
    made = make_prompt(tokens + len(ask("    ")), 20, seed, recent=tokens // 3)
    body, answers = made.tokens[:tokens].tobytes(), []
    order = np.random.default_rng(seed).permutation(len(made.facts))
    for fact in (made.facts[i] for i in order):
        body += ask(fact.key).encode()
        answers.append(len(body) - tokens)
        body += fact.value.encode()
    kept = [step for step in answers if WARM <= step <= STEPS - VALUE_DIGITS]
    return np.frombuffer(body[: tokens + STEPS], dtype=np.uint8), kept


def settings(
    args: argparse.Namespace, bonus: float, prompts: int, tokens: int, buffer: float = 2
) -> dict[str, Any]:
    """Settings of ``SparseConfig``; ``buffer`` is in selections."""
    unit = args.unit
    budget = -(-round(args.share * tokens) // unit) * unit
    pages = -(-(tokens + STEPS) // PAGE) + 1
    return {
        "algorithm": args.algorithm,
        "params": {"sticky": bonus},
        "dense_layers": args.dense_layers,
        "backend": "triton_attention",
        "capture": "off",
        "unit": unit,
        "budget": budget,
        "buffer": int(buffer * (budget - unit)),
        "page_tokens": PAGE,
        "max_requests": 2 * prompts,
        "max_tokens": 2 * prompts * pages * PAGE,
        "max_request_tokens": pages * PAGE,
    }


def run(
    model: PreTrainedModel, args: argparse.Namespace, bonus: float, documents: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Decode the documents ``[prompts, tokens + STEPS]`` together.

    Returns:
        fp32 ``[prompts, STEPS]`` nll of each given token; True where it was the model's choice;
        and misses of each prompt as a share of the selected units.
    """
    prompts, tokens = len(documents), documents.shape[1] - STEPS
    config = SparseConfig(**settings(args, bonus, prompts, tokens))
    with torch.inference_mode(), attach(model, config, engine="transformers") as handle:
        rows = fork_rows(handle, read_contexts(handle, documents[:, :tokens].tolist(), 1024))
        logits, before = [], [(0, 0)] * prompts
        for step in range(STEPS - 1):
            if step == WARM:
                before = moved(handle, rows.slots)
            at = tokens + step
            positions = torch.full((prompts, 1), at)
            given = documents[:, at : at + 1]
            out = model(given, past_key_values=rows, position_ids=positions)
            logits.append(out.logits[:, -1].float())
        after = moved(handle, rows.slots)
    # The first token comes from the prompt, which all bonuses read alike.
    scores, truth = torch.stack(logits, 1), documents[:, tokens + 1 :]
    nll = torch.nn.functional.cross_entropy(scores.mT, truth, reduction="none")
    misses = [
        (end[1] - start[1]) / (sum(end) - sum(start))
        for start, end in zip(before, after, strict=True)
    ]
    pad = torch.nn.functional.pad
    return pad(nll, (1, 0)), pad(scores.argmax(-1) == truth, (1, 0)), torch.tensor(misses)


def moved(handle: Any, slots: Sequence[int]) -> list[tuple[int, int]]:
    """Hits and misses of each request so far."""
    reports = [handle.coordinator.transfers_of([slot]) for slot in slots]
    return [(report.hits, report.misses) for report in reports]


def lines(args: argparse.Namespace, model: PreTrainedModel) -> list[dict[str, Any]]:
    """Measure a cell for each task, bonus and prompt, and their means."""
    found: list[dict[str, Any]] = []
    for task in args.tasks:
        made = [document(task, args.tokens, seed) for seed in range(args.prompts)]
        documents = torch.from_numpy(np.stack([tokens for tokens, _ in made])).long()
        first: list[float] = []
        for bonus in args.sticky:
            nll, chosen, misses = run(model, args, bonus, documents)
            cells = []
            for seed, (_, answers) in enumerate(made):
                right = [bool(chosen[seed, i : i + VALUE_DIGITS].all()) for i in answers]
                cells.append(
                    {
                        "task": task,
                        "sticky": bonus,
                        "prompt": seed,
                        "misses": round(100 * float(misses[seed]), 2),
                        "nll": round(float(nll[seed, WARM:].mean()), 4),
                        "right": sum(right),
                        "answers": len(right),
                    }
                )
            first = first or [cell["nll"] for cell in cells]
            more = [cell["nll"] - base for cell, base in zip(cells, first, strict=True)]
            cells.append(mean_of(cells, more))
            for cell in cells:
                print(json.dumps(cell), flush=True)
            found += cells
    return found


def mean_of(cells: list[dict[str, Any]], more: list[float]) -> dict[str, Any]:
    """Make the line "mean" of the prompts of one bonus; ``more`` is their further nll."""
    error = stdev(more) / len(more) ** 0.5 if len(more) > 1 else 0.0
    return {
        "task": cells[0]["task"],
        "sticky": cells[0]["sticky"],
        "prompt": "mean",
        "misses": round(mean(cell["misses"] for cell in cells), 2),
        "nll_more": round(mean(more), 4),
        "error": round(error, 4),
        "right": sum(cell["right"] for cell in cells),
        "answers": sum(cell["answers"] for cell in cells),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sticky", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    parser.add_argument("--algorithm", default="quest")
    parser.add_argument("--model", default=CHECKPOINT, help="another one that reads bytes")
    parser.add_argument("--dense-layers", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--unit", type=int, default=16)
    parser.add_argument("--tasks", nargs="+", default=["ask", "text"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--share", type=float, default=0.05, help="budget, of the prompt")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    found = lines(args, model)
    if args.out:
        args.out.write_text("".join(f"{json.dumps(cell)}\n" for cell in found))


if __name__ == "__main__":
    main()
