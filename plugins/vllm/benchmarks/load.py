"""Latencies through vLLM under a mixed load, and of a prompt that is asked for twice.

    python plugins/vllm/benchmarks/load.py --contestant topkv --drift 0.15 --out load.jsonl
    python plugins/vllm/benchmarks/load.py --contestant dense --out load.jsonl

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
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from vllm import LLM, SamplingParams

from topkv_bench import geometry
from topkv_bench.engine_bench import save_config
from topkv_bench.vllm_cell import arguments_of, drifts

Row = dict[str, Any]


class Engine:
    """An engine that is watched.

    Args:
        arguments: of ``vllm.LLM``.

    Attributes:
        times: of each token of each request, in seconds.
        tokens: of each request.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.engine = LLM(**arguments).llm_engine
        self.times: dict[str, list[float]] = {}
        self.tokens: dict[str, list[int]] = {}

    def add(self, prompt: list[int], tokens: int) -> str:
        """Hand over a request; its name."""
        name = str(len(self.times))
        how = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, how)
        self.times[name] = []
        return name

    def run(self) -> None:
        """Steps until all have ended."""
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                self.tokens[output.request_id] = [*output.outputs[0].token_ids]
                self.times[output.request_id].append(perf_counter())

    def answer(self, prompt: list[int], tokens: int) -> tuple[float, list[int]]:
        """Seconds to the first token of a request alone, and its tokens."""
        begun = perf_counter()
        name = self.add(prompt, tokens)
        self.run()
        return self.times[name][0] - begun, self.tokens[name]


def mixed(engine: Engine, prompt: Any, requests: int, tokens: int) -> Row:
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


def twice(engine: Engine, prompt: list[int]) -> Row:
    """A row of one prompt, asked for two times."""
    (first, tokens), (second, again) = (engine.answer(prompt, 32) for _ in range(2))
    return {
        "what": "twice",
        "first_token_seconds": [first, second],
        "share": second / first,
        "same_tokens": tokens == again,
    }


def measure(options: argparse.Namespace, folder: Path) -> list[Row]:
    """The rows of a contestant."""
    longest = options.context + options.tokens
    save_config(geometry.config_of(options.model, None, longest), folder)
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
        "engine_args": {"max_model_len": longest} | json.loads(options.engine_args),
    }
    arguments = arguments_of(asked) | {"enable_prefix_caching": True}
    words = geometry.config_of(options.model, None, longest).vocab_size
    prompt = partial(torch.randint, words, (options.context,))
    with drifts(asked):
        engine = Engine(arguments)
        first = prompt().tolist()
        for _ in range(2):  # what is compiled at first, for prompts that are found too
            engine.answer(first, 4)
        rows = [
            twice(engine, prompt().tolist()),
            mixed(engine, lambda: prompt().tolist(), options.requests, options.tokens),
        ]
    reported = {name: value for name, value in vars(options).items() if name != "out"}
    return [reported | row for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contestant", choices=["dense", "topkv"], required=True)
    parser.add_argument("--model", default="llama-3.1-8b", help="a geometry of topkv bench")
    parser.add_argument("--context", type=int, default=32000, help="tokens of each prompt")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--running", type=int, default=8, help="requests at a time")
    parser.add_argument("--tokens", type=int, default=256, help="most that each generates")
    parser.add_argument("--chunk", type=int, default=2048, help="prompt tokens of a step")
    parser.add_argument("--drift", type=float, default=0.15)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--backend", default="flash_attention")
    parser.add_argument("--settings", default="{}", help="more of topkv's, as JSON")
    parser.add_argument("--engine-args", default="{}", help="more of vLLM's, as JSON")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        for row in measure(options, Path(folder)):
            print(json.dumps(row), flush=True)
            if options.out:
                with options.out.open("a") as out:
                    out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
