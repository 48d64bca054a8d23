"""Tokens per second of SmolLM2 with prompt lookup, on edits and on summaries.

    python benchmarks/drafts.py --out benchmarks/results/drafts.jsonl
    python benchmarks/drafts.py --models topkv --set budget=256 --out ...

Prompts are windows of pinned texts: code that is to be written again with one name changed, whose
answer begins with the first lines, and prose that is to be summarized. The model of Transformers
with its own cache (``stock``) and topkv with Quest answer them greedily, without drafts and with
prompt lookup of some numbers of tokens, after runs that compile and record. ``--set`` gives
settings to topkv, so that two runs of this script compare what a setting changes.

``tokens_per_s`` counts from the first token on, the median over ``--repeats`` of the time of all
windows. ``drafted`` tokens were verified, of which ``accepted`` were right, in ``steps`` forwards,
those of prompts among them; ``tokens_a_step`` is what each has brought. ``alike`` is the mean
share of an answer up to the first token that differs from that of ``drafts: 0`` of the same model,
``as_stock`` up to the first that differs from that of the stock model without drafts; null where
that was not measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import product
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
from attrs import asdict, define
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

import topkv
from topkv_evaluation import smollm2
from topkv_evaluation.tasks.splits import REPORTING
from topkv_evaluation.tasks.texts import text_of, windows

Row = dict[str, Any]
MODELS = ("stock", "topkv")
TASKS = {
    "edit": (
        "code",
        "Write this code again, with `self` named `this` everywhere, and nothing else changed.",
    ),
    "summary": ("prose", "Summarize this text in ten sentences."),
}
"""Kind of text, and what is asked for, by task."""

BEGUN = 4
"""Lines of an edit that the answer begins with."""


class Clock(BaseStreamer):
    """Times of the tokens of a call, and how many came at each; the prompt comes first."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: Tensor) -> None:
        self.times.append(perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        """Do nothing."""

    @property
    def decoded(self) -> tuple[int, float]:
        """Tokens behind those of the prompt's forward, and the time that they took."""
        return sum(self.counts[2:]), self.times[-1] - self.times[1]


@define
class Counts:
    """Counts of forwards, those of prompts among them, of drafted and of accepted tokens."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0


def prompts_of(tokenizer: Any, task: str, options: argparse.Namespace) -> list[Tensor]:
    """Ids ``[1, n]`` of the prompts of a task."""
    kind, asked = TASKS[task]
    ids = tokenizer(text_of(kind), return_tensors="pt").input_ids[0]
    begins = windows(len(ids), options.context, options.tokens, options.texts, REPORTING)
    found = []
    for begin in begins:
        text = tokenizer.decode(ids[begin : begin + options.context])
        lines = text.splitlines()[1:-1]  # a window begins and ends within a line
        request = {"role": "user", "content": "\n".join([asked, "", *lines])}
        whole = tokenizer.apply_chat_template(
            [request], tokenize=False, add_generation_prompt=True
        )
        if task == "edit":
            whole += "\n".join(lines[:BEGUN]).replace("self", "this") + "\n"
        found.append(tokenizer(whole, return_tensors="pt").input_ids)
    return found


@contextmanager
def counted(model: Any, prompt: int, counts: Counts) -> Iterator[None]:
    """Count the columns of each forward inside, of which the first brings a prompt."""
    columns: list[int] = []

    def count(module: Any, args: Any, kwargs: Any) -> None:
        columns.append(kwargs["input_ids"].shape[1])

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
    counts.steps += len(columns)
    counts.drafted += sum(columns) - len(columns) + 1 - prompt


def answer(
    model: Any, ids: Tensor, drafts: int, tokens: int, counts: Counts
) -> tuple[list[int], int, float]:
    """Answer of a model, the number of its tokens that were decoded, and the time of these."""
    clock = Clock()
    with counted(model, ids.shape[1], counts):
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, streamer=clock,
            min_new_tokens=tokens, max_new_tokens=tokens,
            prompt_lookup_num_tokens=drafts or None,
        )  # fmt: skip
    said = whole[0, ids.shape[1] :].tolist()
    counts.accepted += len(said) - len(clock.counts[1:])
    return said, *clock.decoded


def settings_of(options: argparse.Namespace, most: int) -> Row:
    """Settings of topkv that verifies up to ``most`` drafts a step."""
    longest = -(-(options.longest + options.tokens + 64) // 64) * 64
    return {
        "algorithm": "quest",
        "backend": "triton_attention",
        "budget": 512,
        "max_requests": 1,
        "max_tokens": longest,
        "max_request_tokens": longest,
        "max_queries": most + 1,
        **dict(options.set),
    }


def measure(
    name: str, model: Any, prompts: list[Tensor], drafts: int, options: argparse.Namespace
) -> tuple[Row, list[list[int]]]:
    """The row of a model and a number of drafts, and the answers."""
    said: list[list[int]] = []
    rates, took = [], 0.0
    # The second use of a step of its kind records it.
    for turn in range(options.warmup + options.repeats):
        said, decoded, took, counts = [], 0, 0.0, Counts()
        for ids in prompts:
            found, tokens, seconds = answer(model, ids, drafts, options.tokens, counts)
            said, decoded, took = [*said, found], decoded + tokens, took + seconds
        if turn >= options.warmup:
            rates.append(decoded / took)
    row = {"model": name, "drafts": drafts, "tokens_per_s": round(median(rates), 1)}
    brought = counts.accepted + counts.steps
    return {
        **row,
        **asdict(counts),
        "acceptance": round(counts.accepted / counts.drafted, 4) if counts.drafted else None,
        "tokens_a_step": round(brought / counts.steps, 3),
    }, said


def share(said: list[list[int]], other: list[list[int]] | None) -> float | None:
    """Mean share of answers up to the first token that differs."""
    if other is None:
        return None
    firsts = [
        next((at for at, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x)) / len(x)
        for x, y in zip(said, other, strict=True)
    ]
    return round(fmean(firsts), 4)


def rows(model: Any, tokenizer: Any, task: str, options: argparse.Namespace) -> Iterator[Row]:
    """Measure all models and drafts of a task."""
    prompts = [ids.to(model.device) for ids in prompts_of(tokenizer, task, options)]
    options.longest = max(ids.shape[1] for ids in prompts)
    answers: dict[tuple[str, int], list[list[int]]] = {}
    for name, drafts in product(options.models, options.drafts):
        settings = settings_of(options, drafts) if name == "topkv" else None
        held: AbstractContextManager[Any] = nullcontext()
        if settings:
            held = topkv.attach(model, settings)
        with held as handle:
            row, said = measure(name, model, prompts, drafts, options)
            captured = str(handle.capture) if handle else None
        answers[name, drafts] = said
        row["alike"] = share(said, answers.get((name, 0)))
        row["as_stock"] = share(said, answers.get(("stock", 0)))
        yield {
            "task": task,
            "prompt": options.longest,
            **row,
            "capture": captured,
            "settings": settings,
        }


def pair(text: str) -> tuple[str, Any]:
    """A setting: ``KEY=VALUE``, the value as JSON or else as text."""
    key, sign, value = text.partition("=")
    if not (key and sign):
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE such as budget=256, got {text!r}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a directory; SmolLM2, fetched once, if none")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=[*TASKS])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 3, 7], help="0: without")
    parser.add_argument("--context", type=int, default=4096, help="tokens of a text")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--texts", type=int, default=4, help="of each task")
    parser.add_argument("--warmup", type=int, default=2, help="runs that are not measured")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", help="of the model")
    parser.add_argument("--set", type=pair, nargs="+", default=[], action="extend")
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    options = parser.parse_args()
    folder = options.model or smollm2.folder()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    sizes = {name: getattr(options, name) for name in ("context", "tokens", "texts", "dtype")}
    for task in options.tasks:
        for row in rows(model, tokenizer, task, options):
            line = json.dumps({"device": machine, **sizes, **row})
            print(line, flush=True)
            if options.out:
                with options.out.open("a") as out:
                    out.write(line + "\n")


if __name__ == "__main__":
    main()
