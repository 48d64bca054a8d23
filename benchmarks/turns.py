"""Time to the first token of chats that come back, without tiers, with host memory, with files.

    python benchmarks/turns.py --storage DIR --out benchmarks/results/turns.jsonl

``--sessions`` chats of ``--context`` tokens each, of which the first ``--shared`` are the same for
all, take turns in a random order that is the same for all arms: every turn sends ``--new`` further
tokens and has ``--answer`` generated. The host pool has room for ``--kept`` chats beside the one
that runs. Arms: ``none`` reads every prompt anew, ``host`` keeps pages in host memory as long as
there is room, ``files`` also in a directory, under ``write_through`` and ``wait_complete``. A
request begins when the one before it has ended, so that times are those of the work alone, without
a queue; with ``--gap`` they come as a Poisson process does, one after ``--gap`` seconds on average
and at the same times for all arms, and a time to the first token counts from there, with the wait
of a request for those before it. First turns, for which nothing but the shared tokens can be
found, count as all others do.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from attrs import asdict
from transformers.generation.streamers import BaseStreamer

import topkv
from topkv_bench.geometry import build, config_of

ARMS = ("none", "host", "files")


class FirstToken(BaseStreamer):
    """Records when the first token of a call is there; the prompt comes before it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing."""


def turn(model: Any, ids: torch.Tensor, answer: int) -> tuple[float, torch.Tensor]:
    """Run a turn; return the time at which its first token was there, and all of its tokens."""
    streamer = FirstToken()
    whole = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, streamer=streamer,
        min_new_tokens=answer, max_new_tokens=answer,
    )  # fmt: skip
    return streamer.times[1], whole


def settings(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    longest = options.context + options.turns * (options.new + options.answer)
    room = -(-longest // 64) * 64
    config = {"algorithm": "quest", "backend": "triton_attention", "budget": options.budget}
    config |= {"max_requests": 1, "max_request_tokens": room, "host_format": options.host_format}
    config |= {"max_tokens": room * (1 + options.kept)}
    kept: dict[str, Any] = {"keep": "all"}
    if arm == "files":
        below = {"path": str(options.storage / f"{time.time_ns()}"), "sync": False}
        kept["storage"] = {"name": "files", "params": below, "fetch": "wait_complete"}
    if arm != "none":
        config["pages"] = {"name": "prefixes", "params": kept}
    return config


def measure(model: Any, arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a row of all turns of all chats."""
    draw = torch.Generator().manual_seed(0)

    def tokens(count: int) -> torch.Tensor:
        drawn = torch.randint(0, model.config.vocab_size, (1, count), generator=draw)
        return drawn.to(model.device)

    first = tokens(options.shared)
    chats = [
        torch.cat([first, tokens(options.context - options.shared)], 1)
        for _ in range(options.sessions)
    ]
    order = [number for number in range(options.sessions) for _ in range(options.turns)]
    random.Random(0).shuffle(order)
    said = [tokens(options.new) for _ in order]
    dice = random.Random(1)
    gaps = [dice.expovariate(1 / options.gap) if options.gap else 0.0 for _ in order]
    times, waits, said_tokens = [], [], 0
    with topkv.attach(model, settings(arm, options)) as handle:
        turn(model, tokens(options.context), options.answer)  # kernels are compiled
        if arm != "none":
            handle.prefixes.forget()
        before = handle.prefixes.counts.found
        began = due = time.perf_counter()
        for number, more, gap in zip(order, said, gaps, strict=True):
            chats[number] = torch.cat([chats[number], more], 1)
            said_tokens += chats[number].shape[1]
            due = due + gap if options.gap else time.perf_counter()
            time.sleep(max(0.0, due - time.perf_counter()))
            waits.append(time.perf_counter() - due)
            first_token, chats[number] = turn(model, chats[number], options.answer)
            times.append(first_token - due)
        whole = time.perf_counter() - began
        counts = handle.prefixes.counts
        row = {"arm": arm, "prompt_tokens": said_tokens, "found": counts.found - before}
        if counts.storage:
            handle.coordinator.keeper.storage.wait()
            row["storage"] = asdict(counts.storage)
    return {
        **row,
        "hit_rate": round(row["found"] / said_tokens, 4),
        "mean_s": round(statistics.mean(times), 4),
        "median_s": round(statistics.median(times), 4),
        "p99_s": round(sorted(times)[int(0.99 * (len(times) - 1))], 4),
        "mean_wait_s": round(statistics.mean(waits), 4),
        "seconds": round(whole, 2),
        "answers": hash(tuple(tuple(chat[0].tolist()) for chat in chats)) & 0xFFFFFFFF,
        "times": [round(each, 4) for each in times],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-8b", help="a geometry of topkv bench")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--context", type=int, default=25600, help="tokens of a chat's first turn")
    parser.add_argument(
        "--shared", type=int, default=4096, help="of which all chats have the same"
    )
    parser.add_argument("--new", type=int, default=1024, help="tokens that a turn adds")
    parser.add_argument("--answer", type=int, default=32, help="tokens that are generated")
    parser.add_argument(
        "--kept", type=int, default=3, help="chats that the host pool has room for"
    )
    parser.add_argument(
        "--gap", type=float, default=0.0, help="seconds between requests, on average"
    )
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--host-format", default="model", help="model or fp8, in all arms")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    parser.add_argument("--storage", type=Path, required=True, help="directory of topkv-files")
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    longest = options.context + options.turns * (options.new + options.answer) + 64
    model = build(
        config_of(options.model, None, longest),
        torch.device("cuda" if cuda else "cpu"),
        torch.bfloat16 if cuda else torch.float32,
    )
    name = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    asked = {key: value for key, value in vars(options).items() if key not in ("storage", "out")}
    for arm in options.arms:
        row = {"device": name, "torch": torch.__version__, **asked, **measure(model, arm, options)}
        print(json.dumps(row), flush=True)
        if options.out:
            with options.out.open("a") as out:
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
