"""Latencies through an engine under a mixed load, and of a prompt that is asked for twice.

``mixed``: all requests are there from the beginning, as many run as there is room for, and each
that ends lets the next one in, whose prompt is read in chunks beside those that decode. ``itl_ms``
is the time between two tokens of a request, over all of them. ``twice``: the time to the first
token of a prompt alone, then of the same prompt out of the prefix cache, and whether both generate
the same. Prompts are random and of one length; weights are random, and so selections of topkv are
written over with those of a stated drift. A process of its own for each contestant.
"""

from __future__ import annotations

import argparse
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from topkv_bench import geometry
from topkv_bench.engine_bench import save_config
from topkv_bench.engine_cell import drifts
from topkv_bench.rows import Row


class Watched(ABC):
    """An engine that is watched.

    Attributes:
        times: of each token of each request, in seconds.
        tokens: of each request.
    """

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self.tokens: dict[str, list[int]] = {}

    @abstractmethod
    def add(self, prompt: list[int], tokens: int) -> str:
        """Hand over a request; its name."""

    @abstractmethod
    def run(self) -> None:
        """Step until all have ended."""

    def answer(self, prompt: list[int], tokens: int) -> tuple[float, list[int]]:
        """Seconds to the first token of a request alone, and its tokens."""
        begun = perf_counter()
        name = self.add(prompt, tokens)
        self.run()
        return self.times[name][0] - begun, self.tokens[name]


def mixed(engine: Watched, prompt: Callable[[], list[int]], requests: int, tokens: int) -> Row:
    """A row of ``requests`` that generate up to ``tokens`` each."""
    draw, begun = random.Random(0), perf_counter()
    names = [engine.add(prompt(), draw.randint(tokens // 4, tokens)) for _ in range(requests)]
    engine.run()
    times = [engine.times[name] for name in names]
    gaps = [1e3 * (later - sooner) for each in times for sooner, later in pairwise(each)]
    cuts = quantiles(gaps, n=100)
    generated = sum(len(engine.tokens[name]) for name in names)
    seconds = max(each[-1] for each in times) - begun
    return {
        "what": "mixed",
        "itl_ms": {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(gaps)},
        "seconds": seconds,
        "generated": generated,
        "tokens_per_second": generated / seconds,
    }


def twice(engine: Watched, prompt: list[int]) -> Row:
    """A row of one prompt, asked for two times."""
    (first, tokens), (second, again) = (engine.answer(prompt, 32) for _ in range(2))
    return {
        "what": "twice",
        "first_token_seconds": [first, second],
        "share": second / first,
        "same_tokens": tokens == again,
    }


def run(start: Callable[[dict[str, Any]], Watched]) -> None:
    """Run the command of an engine.

    Args:
        start: starts the engine, with a prefix cache, for what a cell is asked for.
    """
    options = _options()
    with TemporaryDirectory() as folder:
        for row in _measure(start, options, Path(folder)):
            print(json.dumps(row), flush=True)
            if options.out:
                with options.out.open("a") as out:
                    out.write(json.dumps(row) + "\n")


def _measure(
    start: Callable[[dict[str, Any]], Watched], options: argparse.Namespace, folder: Path
) -> list[Row]:
    longest = options.context + options.tokens
    config = geometry.config_of(options.model, None, longest)
    save_config(config, folder)
    settings = {"algorithm": "quest", "backend": options.backend, "budget": options.budget}
    settings |= {"max_requests": options.running, "max_tokens": (options.running + 2) * longest}
    asked = {
        "contestant": options.contestant,
        "context": options.context,
        "requests": options.running,
        "tokens": longest,
        "drift": options.drift if options.contestant == "topkv" else None,
        "queries": None,
        "fill": "prompt",
        "settings": {**settings, **json.loads(options.settings)},
        "model": str(folder),
        "dtype": "bfloat16" if options.device == "cuda" else "float32",
        "device": options.device,
        "chunk": options.chunk,
        "engine_args": json.loads(options.engine_args),
    }
    random_ids = partial(torch.randint, config.vocab_size, (options.context,))
    with drifts(asked):
        engine = start(asked)
        first = random_ids().tolist()
        for _ in range(2):  # what is compiled at first, for prompts that are found too
            engine.answer(first, 4)
        rows = [twice(engine, random_ids().tolist())]
        if options.requests:
            load = options.requests, options.tokens
            rows.append(mixed(engine, lambda: random_ids().tolist(), *load))
    reported = {name: value for name, value in vars(options).items() if name != "out"}
    return [reported | row for row in rows]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contestant", choices=["dense", "topkv"], required=True)
    parser.add_argument("--model", default="llama-3.1-8b", help="a geometry of topkv bench")
    parser.add_argument("--context", type=int, default=32000, help="tokens of each prompt")
    parser.add_argument("--requests", type=int, default=24, help="0: twice alone")
    parser.add_argument("--running", type=int, default=8, help="requests at a time")
    parser.add_argument("--tokens", type=int, default=256, help="most that each generates")
    parser.add_argument("--chunk", type=int, default=2048, help="prompt tokens of a step")
    parser.add_argument("--drift", type=float, default=0.15)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--backend", default="flash_attention")
    parser.add_argument("--settings", default="{}", help="more of topkv's, as JSON")
    parser.add_argument("--engine-args", default="{}", help="more of the engine's, as JSON")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    return parser.parse_args()
