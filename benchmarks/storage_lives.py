"""Drawn lives of requests over a storage, many at a time, and counts of what they did.

    PYTHONPATH=. python benchmarks/storage_lives.py --actions 100000 --processes 16 \\
        --out benchmarks/results/storage_lives.jsonl

Each process draws lives (``tests.machines.storage``) on the CPU until all together have
done ``--actions``: requests that begin, read prompts, decode, fork, go back and end; coordinators
that end and begin anew; a storage that fails, fills up and whose objects are damaged. All outputs
are held to a coordinator that computes everything. The first wrong one ends the run with its
traceback and exit status 1. A line has counts of what was drawn, by configuration.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

CONFIGURATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"page_tokens": 8},
    {"host_format": "fp8"},
    {"layers": {"0-2": "resident"}},
)
LIVES = 20


def counted(method: Callable[[Any], None], done: Counter[str], what: str) -> Callable[..., None]:
    """Wrap a method, so that it counts its calls that came to their end."""

    def call(self: Any) -> None:
        method(self)
        done[what] += 1

    return call


def live(number: int, left: Any, found: Any) -> None:
    """Draw lives until nothing is ``left`` to do; put counts, or a traceback, into ``found``."""
    os.environ["HYPOTHESIS_PROFILE"] = "default"  # each process draws its own
    import hypothesis
    import torch

    from tests.machines import storage
    from topkv_testing.tiers import tier

    torch.set_num_threads(1)
    hypothesis.settings.register_profile(
        "lives", deadline=None, derandomize=False, database=None,
        suppress_health_check=[*hypothesis.HealthCheck],
    )  # fmt: skip
    hypothesis.settings.load_profile("lives")
    done = Counter[str]()
    for name, what in (("act", "actions"), ("close", "lives")):
        setattr(storage.StoredLives, name, counted(getattr(storage.StoredLives, name), done, what))
    try:
        while left.value > 0:
            options = CONFIGURATIONS[number % len(CONFIGURATIONS)]
            done.clear()
            done["fetched"] = storage.run_storage(tier("cpu"), cpu=LIVES, **options)
            with left.get_lock():
                left.value -= done["actions"]
            found.put((json.dumps(options), dict(done)))
            number += 1
    except BaseException:
        found.put((None, traceback.format_exc()))
        left.value = 0
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--actions", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, help="write JSON lines here as well")
    options = parser.parse_args()
    context, began = get_context("spawn"), time.monotonic()
    left, found = context.Value("q", options.actions), context.Queue()
    running = [
        context.Process(target=live, args=(number, left, found))
        for number in range(options.processes)
    ]
    for each in running:
        each.start()
    totals: dict[str, Counter[str]] = {}
    while any(each.is_alive() for each in running) or not found.empty():
        if found.empty():
            time.sleep(0.1)
            continue
        name, done = found.get()
        if name is None:
            raise SystemExit(done)
        totals.setdefault(name, Counter()).update(done)
    failed = sum(each.exitcode != 0 for each in running)
    lines = [{"options": json.loads(name), **done} for name, done in sorted(totals.items())]
    whole: Counter[str] = sum(totals.values(), Counter())
    lines.append({"all": dict(whole), "processes": options.processes, "failed": failed})
    lines[-1]["seconds"] = round(time.monotonic() - began, 1)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    print(text, end="")
    if options.out:
        options.out.write_text(text)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
