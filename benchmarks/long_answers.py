"""Facts of a prompt that are still known after a long answer, of thousands of tokens.

    python benchmarks/long_answers.py --keeps keydiff random oldest --out keydiff_cpu.jsonl

The checkpoint of topkv-evaluation reads a prompt with planted facts and then decodes text that
has none, token by token, as if it had generated it, while pages are given back. Then each fact is
asked for, in a fork of its own. Beside the stages are two controls of the same sizes: pages at
random, and the oldest ones. ``kl`` is that of the decoded text, from attention to everything.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import topkv
from topkv_evaluation import CHECKPOINT
from topkv_evaluation.retrieval import ASK, FACT, VALUE_DIGITS, pinned_text
from topkv_keydiff.stage import KeyDiff

Row = dict[str, Any]
Keep = Callable[..., None]


def at_random(
    self: KeyDiff, layer: Any, slot: int, length: int, position: int, scores: Tensor
) -> None:
    """Score pages at random, alike in all layers."""
    drawn = torch.rand(scores.shape[1], generator=torch.Generator().manual_seed(length))
    scores.copy_(drawn.expand_as(scores))


def oldest(
    self: KeyDiff, layer: Any, slot: int, length: int, position: int, scores: Tensor
) -> None:
    """Score pages by their place, so that the oldest are given back."""
    scores.copy_(torch.arange(scores.shape[1]).expand_as(scores))


CONTROLS: dict[str, Keep] = {"random": at_random, "oldest": oldest}


@contextmanager
def kept_by(name: str) -> Iterator[None]:
    """Score pages by a control, if ``name`` is one."""
    own = KeyDiff.keep
    KeyDiff.keep = CONTROLS.get(name, own)  # type: ignore[method-assign]
    try:
        yield
    finally:
        KeyDiff.keep = own  # type: ignore[method-assign]


def context(seed: int, prompt: int, text: int, facts: int) -> tuple[list[int], list[int], Any]:
    """Make a prompt with facts, text behind it, and the facts: key and value."""
    draw = random.Random(seed)
    source = pinned_text().tobytes()
    start = draw.randrange(len(source) - prompt - text)
    source = source[start:]
    letters = "abcdefghijklmnopqrstuvwxyz"
    planted = [
        ("".join(draw.choices(letters, k=4)), str(draw.randint(10000, 99999)))
        for _ in range(facts)
    ]
    reported = [FACT.format(key=key, value=value).encode() for key, value in planted]
    room = prompt - sum(map(len, reported))
    cuts = sorted(draw.sample(range(64, room), facts))
    head, last = b"", 0
    for cut, fact in zip(cuts, reported, strict=True):
        head, last = head + source[last:cut] + fact, cut
    head += source[last:room]
    return [*head], [*source[room : room + text]], planted


@torch.no_grad()
def answer(model: Any, handle: Any, seed: int, options: argparse.Namespace) -> Row:
    """Measure one context: right answers, and KL of the text."""
    prompt, text, planted = context(seed, options.prompt, options.text, options.facts)
    ids = torch.tensor([prompt + text])
    stock = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    logits = stock(ids, use_cache=False).logits
    dense = logits[0, options.prompt - 1 : -1].double().log_softmax(-1)
    cache = handle.new_cache()
    given = [model(ids[:, : options.prompt], past_key_values=cache).logits[0, -1]]
    pages = 0
    for at in range(options.prompt, ids.shape[1] - 1):
        given.append(model(ids[:, at : at + 1], past_key_values=cache).logits[0, -1])
        pages = max(pages, handle.coordinator.manager.host.used)
    found = torch.stack(given).double().log_softmax(-1)
    kl = (dense.exp() * (dense - found)).sum(-1).mean().item()
    model(ids[:, -1:], past_key_values=cache)
    right = 0
    for key, value in planted:
        twin = cache.fork()
        for token in ASK.format(key=key).encode():
            best = model(torch.tensor([[token]]), past_key_values=twin).logits[0, -1].argmax()
        said = [int(best)]
        while len(said) < VALUE_DIGITS:
            step = model(torch.tensor([said[-1:]]), past_key_values=twin)
            said.append(int(step.logits[0, -1].argmax()))
        right += bytes(said) == value.encode()
        twin.close()
    dropped = int(handle.coordinator.requests.dropped[cache.slots[0]])
    cache.close()
    return {"right": right, "asked": len(planted), "kl": kl, "pages": pages, "dropped": dropped}


def measure(options: argparse.Namespace, name: str, tokens: int) -> Row:
    """Measure one way to keep ``tokens`` tokens; all of them for ``"everything"``."""
    sizes = {"tokens": tokens, "every": options.every, "first": 64, "recent": options.recent}
    whole = options.prompt + options.text + 64
    config: Row = {
        "algorithm": "quest",
        "backend": "triton_attention",
        "dense_layers": [],
        "budget": whole,
        "page_tokens": options.page,
        "max_tokens": 3 * whole,
        "max_request_tokens": whole,
        "max_requests": 2,
    }
    if name != "everything":
        config["stages"] = [{"name": "keydiff", "params": sizes}]
    model, begun = AutoModelForCausalLM.from_pretrained(CHECKPOINT), perf_counter()
    with kept_by(name), topkv.attach(model, config) as handle:
        rows = [answer(model, handle, seed, options) for seed in range(options.contexts)]
    return {
        "keeps": name,
        "tokens": tokens,
        "right": sum(row["right"] for row in rows),
        "asked": sum(row["asked"] for row in rows),
        "kl": fmean(row["kl"] for row in rows),
        "most_pages": max(row["pages"] for row in rows),
        "dropped": fmean(row["dropped"] for row in rows),
        "seconds": perf_counter() - begun,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keeps", nargs="+", default=["keydiff", *CONTROLS, "everything"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024])
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--text", type=int, default=8192, help="tokens that are decoded")
    parser.add_argument("--facts", type=int, default=8, help="of each prompt")
    parser.add_argument("--contexts", type=int, default=4)
    parser.add_argument("--every", type=int, default=128)
    parser.add_argument("--recent", type=int, default=256)
    parser.add_argument("--page", type=int, default=32, help="tokens of a page")
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    options = parser.parse_args()
    reported = {name: value for name, value in vars(options).items() if name != "out"}
    for tokens, name in product(options.tokens, options.keeps):
        row = {**reported, **measure(options, name, tokens)}
        print(json.dumps(row), flush=True)
        if options.out:
            with options.out.open("a") as out:
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
