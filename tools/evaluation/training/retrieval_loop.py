"""The loop of a training run: updates until the time is up, means on a line now and then."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from retrieval_batches import Batch, BatchMaker
from retrieval_schedule import Schedule
from torch import Tensor

LOG_SECONDS = 10.0
STEPS_IN_FLIGHT = 2
CLIP = 1.0
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
Row = dict[str, float]


def say(text: str) -> None:
    print(text, flush=True)


def adamw(parameters: Iterable[torch.nn.Parameter], rate: float) -> torch.optim.AdamW:
    """Make an AdamW that decays matrices and leaves the gains of the norms alone."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=BETAS, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def update(optimizer: torch.optim.Optimizer) -> None:
    """Clip the gradients of the optimizer's parameters, apply them, and forget them."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    torch.nn.utils.clip_grad_norm_(parameters, CLIP)
    # One overflow would spoil the weights for good: a gradient that is not finite becomes zero.
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


class Progress:
    """Means of the reports since the last line; prints one every ten seconds and keeps it.

    Reports are added up on the device and read only when a line is printed.

    Args:
        columns: names of the entries of a report, in order.
        observe: measures more for a line, from the length of the sequences.
        sink: called with each row as well.
    """

    def __init__(
        self,
        columns: Sequence[str],
        observe: Callable[[int], Row] | None = None,
        sink: Callable[[Row], None] | None = None,
    ) -> None:
        self.curve: list[Row] = []
        self._columns, self._observe, self._sink = columns, observe, sink
        self._began = self._printed = time.monotonic()
        self._sum: Tensor | float = 0.0
        self._count = 0

    def add(self, report: Tensor) -> None:
        self._sum = self._sum + report
        self._count += 1

    def due(self) -> bool:
        return time.monotonic() - self._printed >= LOG_SECONDS

    def line(self, number: int, length: int, rate: float) -> None:
        """Print and keep the means, and begin anew."""
        if not isinstance(self._sum, Tensor):
            return
        means = dict(zip(self._columns, (self._sum / self._count).tolist(), strict=True))
        now = time.monotonic()
        speed = self._count / (now - self._printed)
        row = {"seconds": now - self._began, "step": number, "length": length, "rate": rate}
        row |= means | {"steps_per_s": speed}
        if self._observe is not None:
            row |= self._observe(length)
        row = {key: round(value, 6) for key, value in row.items()}
        self.curve.append(row)
        if self._sink is not None:
            self._sink(row)
        rest = (
            f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
            for key, value in row.items()
            if key not in ("seconds", "rate")
        )
        say(f"{row['seconds']:6.0f} s  rate {rate:.1e}  " + "  ".join(rest))
        self._printed, self._sum, self._count = time.monotonic(), 0.0, 0


def follow(
    schedule: Schedule,
    seconds: float,
    maker: BatchMaker,
    take: Callable[[Batch, float], Tensor],
    progress: Progress,
) -> tuple[int, float]:
    """Call ``take(batch, rate)`` until ``seconds`` have passed, at least once.

    Args:
        take: makes one step at a learning rate and returns its report, on the device.

    Returns:
        The number of steps and the seconds they took.
    """
    in_flight, number = deque[torch.cuda.Event](), 0
    began = time.monotonic()
    stage, fraction = schedule.stage(0.0), 0.0
    while fraction < 1:
        rate = schedule.rate(fraction)
        if progress.due() or schedule.stage(fraction) is not stage:
            progress.line(number, stage.length, rate)
            stage = schedule.stage(fraction)
        report = take(maker(stage.rows, stage.length), rate)
        progress.add(report)
        number += 1
        if report.device.type == "cuda":
            in_flight.append(torch.cuda.Event())
            in_flight[-1].record()
            # The clock drives the schedule, so the host may be only a few steps ahead.
            if len(in_flight) > STEPS_IN_FLIGHT:
                in_flight.popleft().synchronize()
        fraction = (time.monotonic() - began) / seconds
    progress.line(number, stage.length, schedule.rate(1.0))
    return number, time.monotonic() - began
