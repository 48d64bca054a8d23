"""Time to the first token of a prompt that was seen before, and of one that was not.

    python benchmarks/prefix.py --context 32768 131072 --out benchmarks/results/prefix.jsonl

Through ``model.generate`` with ``pages: prefixes``: a model of random weights (``--model``,
as in ``topkv bench``) reads a prompt of ``--context`` tokens, generates one token and ends.
``cold`` is a prompt of other tokens, ``again`` one whose tokens but the last ``--new`` were read
before. With ``--storage NAME`` pages go to that storage, and ``stored`` is a prompt that was read
before and that the host pool has forgotten: ``--storage files --param path=DIR`` (the pages are in
the system's page cache), or ``--storage redis --param address=unix:/run/redis.sock``. A line has
the median of ``--repeats`` each, the shares, and the tokens that were found.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from attrs import asdict

import topkv
from topkv_bench.geometry import build, config_of


def pair(text: str) -> list[str]:
    """Parse ``NAME=VALUE``."""
    name, found, value = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return [name, value]


def seconds(model: Any, ids: torch.Tensor) -> float:
    """Seconds of one call of ``generate`` for one token."""
    if ids.is_cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=1
    ).cpu()
    return time.perf_counter() - began


def stored(model: Any, handle: Any, ids: torch.Tensor) -> float:
    """Seconds of one call of ``generate`` for a prompt whose pages only the storage has."""
    prefixes = handle.coordinator.keeper
    prefixes.storage.wait()
    prefixes.forget(stored=False)
    return seconds(model, ids)


def measure(model: Any, config: dict[str, Any], context: int, options: argparse.Namespace) -> dict:
    room = {"max_tokens": 2 * context, "max_request_tokens": context, "max_requests": 1}
    kept: dict[str, Any] = {"keep": "prompt"}
    vocabulary, times = model.config.vocab_size, {"cold": [], "again": []}
    if options.storage:
        below = {"name": options.storage, "params": dict(options.param)}
        below |= {"write": "write_through", "fetch": "wait_complete"}
        kept["storage"] = below
        times["stored"] = []

    pages = {"name": "prefixes", "params": kept}

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(0, vocabulary, (1, count), device=model.device)

    with topkv.attach(model, {**config, **room, "pages": pages}) as handle:
        seconds(model, tokens(context))  # kernels are compiled
        for _ in range(options.repeats):
            ids = tokens(context)
            times["cold"].append(seconds(model, ids))
            before = handle.prefixes.counts.found
            times["again"].append(
                seconds(model, torch.cat([ids[:, : -options.new], tokens(options.new)], 1))
            )
            found = handle.prefixes.counts.found - before
            if options.storage:
                times["stored"].append(stored(model, handle, ids))
        counts = handle.prefixes.counts.storage
    cold, again = (statistics.median(times[name]) for name in ("cold", "again"))
    below = {}
    if counts:
        median = statistics.median(times["stored"])
        below = {"stored_s": round(median, 4), "stored_share": round(median / cold, 4)}
        below |= {"storage": asdict(counts)}
    return {
        "context": context,
        "new": options.new,
        "cold_s": round(cold, 4),
        "again_s": round(again, 4),
        "share": round(again / cold, 4),
        "found": found,
        **below,
        "times": {name: [round(each, 4) for each in some] for name, some in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--context", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--new", type=int, default=100, help="tokens that are not found")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--host-format", default="model", help="model or fp8")
    parser.add_argument("--storage", help="an installed storage; none by default")
    parser.add_argument("--param", type=pair, action="append", default=[], help="NAME=VALUE of it")
    parser.add_argument("--out", type=Path, help="write JSON lines here as well")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    config = {"algorithm": "quest", "backend": "triton_attention", "budget": 2048}
    config["host_format"] = options.host_format
    model = build(
        config_of(options.model, None, max(options.context) + 1),
        device,
        torch.bfloat16 if cuda else torch.float32,
    )
    name = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    lines = [{"device": name, "model": options.model, "torch": torch.__version__}]
    lines[0] |= {"host_format": options.host_format, "storage": options.storage}
    print(json.dumps(lines[0]))
    for context in options.context:
        lines.append(measure(model, config, context, options))
        print(json.dumps(lines[-1]), flush=True)
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
