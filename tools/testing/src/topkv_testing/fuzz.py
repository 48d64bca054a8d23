"""Fuzz the resolver of a transfer engine: many lanes at once against an ordered model.

``python -m topkv_testing.fuzz --steps 1000000 --impl triton --device cuda``. One step is one
lane's plan and load. Lanes of all lengths, resident or not, with sliding, jumping and wild
selections, among padded rows; requests end, slots are reused. In some calls rows append as many
tokens as the ring takes, up to 8, and any number of them is rejected. Each plan, the order and
the maps must be the model's; loaded slots must have the bytes of the host, and the host those of
the tokens.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from topkv.entries import IMPLS
from topkv.plugins import registry
from topkv.types import GroupShape
from topkv_testing.machines.fuzz_lanes import FuzzedGroup
from topkv_testing.tiers import CUDA
from topkv_testing.transfer.bench import Make, group_shape

CALLS = 64
"""Calls on one group before the next group's turn; a seed reproduces as many."""


class Violation(AssertionError):
    """The engine and the model disagree."""


def groups(requests: int) -> list[GroupShape]:
    """The groups that take turns: both scopes, K == C, rings of two to nine, all units."""
    shapes: list[dict[str, Any]] = [
        {"select": 8, "slots": 16, "unit": 1, "lane_heads": 4, "units": 96, "ring": 5},
        {"select": 6, "slots": 6, "unit": 2, "lane_heads": 3, "units": 40, "ring": 3},
        {"select": 12, "slots": 31, "unit": 4, "lane_heads": 1, "units": 120, "ring": 2},
        {"select": 1, "slots": 3, "unit": 2, "lane_heads": 2, "units": 16, "ring": 2},
        {"select": 20, "slots": 33, "unit": 1, "lane_heads": 2, "units": 64, "ring": 9},
    ]
    return [group_shape(requests=requests, dim=8, layers=2, **shape) for shape in shapes]


def fuzz(
    make: Make,
    steps: int,
    device: torch.device,
    impl: str,
    seed: int,
    requests: int = 64,
    calls: int = CALLS,
    progress: Callable[[int], None] = lambda steps: None,
) -> int:
    """Run at least ``steps`` steps.

    Args:
        make: factory of the engine.
        seed: of the first group; each turn takes the next one.
        requests: rows of a call.
        calls: on one group before the next one's turn.
        progress: called with the number of steps of each call.

    Returns:
        The steps that were run.

    Raises:
        Violation: with the seed that shows it again, alone.
    """
    shapes, done, turn = groups(requests), 0, 0
    while done < steps:
        now = seed + turn
        again = f"reproduce with --seed {now} --requests {requests} --steps 1"
        try:
            run = FuzzedGroup(make, shapes[now % len(shapes)], device, impl, now)
            for _ in range(calls):
                count = run.call()
                done += count
                progress(count)
        except AssertionError as error:
            raise Violation(f"{error}\n{again}") from None
        except Exception as error:
            raise Violation(f"{type(error).__name__}: {error}\n{again}") from error
        turn += 1
    return done


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m topkv_testing.fuzz", description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--impl", choices=IMPLS, default=IMPLS[int(CUDA)])
    parser.add_argument("--device", default="cuda" if CUDA else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=64, help="rows of a call")
    parser.add_argument("--engine", default="zero_copy", help="a transfer engine by name")
    parser.add_argument("--log", type=Path, help="append the last lines to this file as well")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Fuzz; return 0 if no step violated the contract, else 1."""
    options = _parser().parse_args(argv)
    plugins = registry()

    def make(*args: Any) -> Any:
        return plugins.create("transfer", options.engine, *args)

    begin, done, violation = time.perf_counter(), 0, None
    with _bar(options.steps) as advance:

        def progress(count: int) -> None:
            nonlocal done
            done += count
            advance(count)

        try:
            fuzz(
                *(make, options.steps, torch.device(options.device), options.impl, options.seed),
                requests=options.requests,
                progress=progress,
            )
        except Violation as found:
            violation = str(found)
    seconds = time.perf_counter() - begin
    lines = [violation] if violation else []
    lines.append(f"{done} steps, {int(violation is not None)} violations, {seconds:.1f} seconds")
    print("\n".join(lines))
    if options.log:
        with options.log.open("a") as log:
            log.write("\n".join(lines) + "\n")
    return int(violation is not None)


class _bar:
    """A progress bar where stderr is a terminal and rich is installed, else nothing."""

    def __init__(self, total: int) -> None:
        self.bar: Any = None
        if sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import Progress
            except ImportError:
                return
            self.bar = Progress(console=Console(stderr=True))
            self.task = self.bar.add_task("steps", total=total)

    def __enter__(self) -> Callable[[int], None]:
        if self.bar is None:
            return lambda count: None
        self.bar.start()
        return lambda count: self.bar.advance(self.task, count)

    def __exit__(self, *raised: object) -> None:
        if self.bar is not None:
            self.bar.stop()


if __name__ == "__main__":
    sys.exit(main())
