"""Misses under eviction by scores, beside LRU and Belady, with and without sticky selection.

    python benchmarks/eviction.py --out FILE

Model, prompts and counted steps are those of ``sticky.py``. Each bonus is recorded once, with the
scores of all units, in a buffer of ``--recorded`` selections under LRU. Buffers of other sizes are
then replayed by ``topkv_simulate``; where a bonus is given, units are selected anew from the
recorded scores and from the units in the replayed buffer. The replay of the recorded
buffer has to count what the coordinator counted, row by row. Hidden states are those of the
recording, which matters only for a bonus in another buffer.

Policies: ``lru``; ``ema W``, which evicts the lowest mean of the log scores of the steps since a
unit was loaded, of weight W on the past (0: the score of this step); ``belady``, for the units
that were selected under LRU; ``fixed``, LRU for the units of the recording, as ``topkv simulate``
has it. A line for each task, bonus and buffer, in selections: misses in % of the selected units,
mean and standard deviation over the prompts, and in ``as_without`` the share of the units selected
under LRU that would have been selected without the bonus.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import sticky
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import topkv_authoring.sticky
import topkv_double_sparsity.algorithm
from topkv import attach
from topkv.config import SparseConfig
from topkv_evaluation import CHECKPOINT
from topkv_evaluation.eval.batches import fork_rows, read_contexts
from topkv_simulate.policies import Belady, LeastRecentlyUsed
from topkv_simulate.recorder import recording
from topkv_simulate.replay import Lanes, Wanted
from topkv_simulate.trace import ROW, Trace

FORCED = np.float32(1e4)
"""Score of forced units in place of +inf, of which no mean can be taken."""


@contextmanager
def scores_of(module: Any) -> Iterator[list[np.ndarray]]:
    """Yield a list of the scores ``[N, U]`` of each call of the module's ``prefer_resident``."""
    found: list[np.ndarray] = []
    real = module.prefer_resident

    def kept(layer: Any, scores: torch.Tensor, *others: Any, **named: Any) -> None:
        units = scores[:, : layer.group.max_units].numpy().copy()
        found.append(np.minimum(units, FORCED))
        real(layer, scores, *others, **named)

    module.prefer_resident = kept
    try:
        yield found
    finally:
        module.prefer_resident = real


class Recording:
    """The recording of one bonus: selections, scores, and the rows that count.

    Attributes:
        scores: fp32 ``[R, N, U]`` before the bonus, of the N lanes of a request.
        counted: for each prompt the rows of its counted steps.
    """

    def __init__(self, trace: Trace, scores: list[np.ndarray], slots: list[int], bonus: float):
        self.trace, self.bonus = trace, bonus
        (self.group,) = trace.groups
        layers, heads = self.group.ids.shape[1:3]
        rounds = []
        for first in range(0, len(scores), layers):
            found = np.stack(scores[first : first + layers])  # [layers, B * heads, U]
            found = found.reshape(layers, -1, heads, found.shape[-1]).swapaxes(0, 1)
            rounds.append(found.reshape(len(found), layers * heads, -1))
        self.scores = np.concatenate(rounds)
        self.counted = [np.flatnonzero(trace.rows[:, ROW.slot] == s)[sticky.WARM :] for s in slots]


def record(
    model: PreTrainedModel, args: argparse.Namespace, bonus: float, documents: torch.Tensor
) -> Recording:
    """Decode the documents ``[prompts, tokens + STEPS]`` as ``sticky.run`` does."""
    prompts, tokens = len(documents), documents.shape[1] - sticky.STEPS
    config = SparseConfig(**sticky.settings(args, bonus, prompts, tokens, args.recorded))
    single = args.algorithm == "double_sparsity"
    module = topkv_double_sparsity.algorithm if single else topkv_authoring.sticky
    with (
        torch.inference_mode(),
        attach(model, config, engine="transformers") as handle,
        recording(handle.coordinator) as recorder,
        scores_of(module) as scores,
    ):
        rows = fork_rows(handle, read_contexts(handle, documents[:, :tokens].tolist(), 1024))
        for at in range(tokens, tokens + sticky.STEPS - 1):
            positions = torch.full((prompts, 1), at)
            model(documents[:, at : at + 1], past_key_values=rows, position_ids=positions)
        return Recording(recorder.trace(), scores, list(rows.slots), bonus)


class Mean(LeastRecentlyUsed):
    """Evict the lowest exponential mean of log scores, kept for units in the buffer alone."""

    def __init__(self, weight: float) -> None:
        self.weight = np.float32(weight)

    def see(self, slots: np.ndarray, scores: np.ndarray, present: np.ndarray) -> None:
        """Take the scores ``[B, N, U]`` of a step; ``present`` is ``[B, N, U + 1]`` before it."""
        before = self.means[slots][..., :-1]
        mixed = self.weight * before + (1 - self.weight) * scores
        self.means[slots, :, :-1] = np.where(present[..., :-1], mixed, scores)

    def reordered(self, held: np.ndarray, slots: np.ndarray) -> np.ndarray:
        means = np.take_along_axis(self.means[slots], held, -1)
        return np.take_along_axis(held, np.argsort(means, -1, kind="stable"), -1)


class Choosing(Lanes):
    """Lanes that select at each step, from recorded scores and the units that they hold."""

    def __init__(self, recording: Recording, slots: int, policy: LeastRecentlyUsed) -> None:
        group, trace = recording.group, recording.trace
        wanted = Wanted.of(trace, group)
        super().__init__(trace, wanted, slots, policy)
        self.recording, self.width = recording, group.geometry.select
        self.exact = np.zeros(wanted.units.shape[:2], np.int64)
        if isinstance(policy, Mean):
            policy.means = np.full(self.present.shape, -2 * FORCED, np.float32)

    def plan(self, rows: slice) -> None:
        table, wanted = self.trace.rows[rows], self.wanted
        slots, scores = table[:, ROW.slot], self.recording.scores[rows]
        units = np.arange(scores.shape[-1])
        low = wanted.geometry.ring_low(table[:, ROW.high])[:, None, None]
        here = self.present[slots][..., :-1] | (units >= low)
        bonus = np.float32(self.recording.bonus) * here
        closed = units < self.recording.group.limits[rows][:, None, None]
        chosen = self._best(np.where(closed, scores + bonus, -np.inf))
        plain = np.zeros_like(here)
        np.put_along_axis(plain, self._best(np.where(closed, scores, -np.inf)), True, -1)
        self.exact[rows] = np.take_along_axis(plain, chosen, -1).sum(-1)
        wanted.ring[rows] = (chosen >= low).sum(-1)
        wanted.units[rows] = np.where(chosen >= low, wanted.free, chosen)
        if isinstance(self.policy, Mean):
            self.policy.see(slots, scores, self.present[slots])
        super().plan(rows)

    def _best(self, scores: np.ndarray) -> np.ndarray:
        """The units of the highest scores, ascending; of equal ones the lower."""
        least = np.partition(scores, -self.width)[..., -self.width, None]
        equal, above = scores == least, scores > least
        lacking = self.width - above.sum(-1, keepdims=True)
        best = above | (equal & (np.cumsum(equal, -1) <= lacking))
        return np.nonzero(best)[-1].reshape(*scores.shape[:-1], self.width)


def shares(recording: Recording, misses: np.ndarray) -> list[float]:
    """Misses of each prompt in % of its selected units, from ``[R, N]``."""
    units = recording.group.geometry.select * misses.shape[1]
    return [100 * float(misses[rows].sum() / (len(rows) * units)) for rows in recording.counted]


def check(recording: Recording) -> None:
    """Check that the replayed buffer misses what the coordinator missed in every row and lane."""
    group = recording.group
    replayed = Choosing(recording, group.geometry.buffer_slots, LeastRecentlyUsed())
    replayed.run()
    wrong = replayed.misses != group.counts[..., 1].reshape(replayed.misses.shape)
    if wrong.any():
        raise SystemExit(f"bonus {recording.bonus}: {wrong.sum()} of {wrong.size} plans differ")


def cell(recording: Recording, multiple: float, args: argparse.Namespace) -> dict[str, Any]:
    """Replay all policies in a buffer of ``multiple`` selections."""
    slots = int(multiple * recording.group.geometry.select)
    lru = Choosing(recording, slots, LeastRecentlyUsed())
    lru.run()
    found = {"lru": shares(recording, lru.misses)}
    exact = [lru.exact[rows].sum() for rows in recording.counted]
    for weight in args.weights:
        run = Choosing(recording, slots, Mean(weight))
        run.run()
        found[f"ema {weight:g}"] = shares(recording, run.misses)
    best = Lanes(recording.trace, lru.wanted, slots, LeastRecentlyUsed())
    best.policy = Belady(recording.trace, lru.wanted.units, lru.wanted.free)
    best.run()
    found["belady"] = shares(recording, best.misses)
    fixed = Lanes(recording.trace, Wanted.of(recording.trace, recording.group), slots, lru.policy)
    fixed.run()
    found["fixed"] = shares(recording, fixed.misses)
    selected = sum(map(len, recording.counted)) * lru.misses.shape[1] * lru.width
    return {
        "sticky": recording.bonus,
        "buffer": multiple,
        **{name: round(mean(each), 2) for name, each in found.items()},
        "sd": {n: round(stdev(e) if len(e) > 1 else 0.0, 2) for n, e in found.items()},
        "as_without": round(100 * float(sum(exact)) / selected, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sticky", type=float, nargs="+", default=[0.0, 0.5])
    parser.add_argument("--buffers", type=float, nargs="+", default=[1.5, 2, 3, 4])
    parser.add_argument("--recorded", type=float, default=2)
    parser.add_argument("--weights", type=float, nargs="*", default=[0, 0.5, 0.8])
    parser.add_argument("--algorithm", choices=["quest", "double_sparsity"], default="quest")
    parser.add_argument("--dense-layers", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--unit", type=int, default=16)
    parser.add_argument("--tasks", nargs="+", default=["ask", "text"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--share", type=float, default=0.05, help="budget, of the prompt")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    found = []
    for task in args.tasks:
        made = [sticky.document(task, args.tokens, seed)[0] for seed in range(args.prompts)]
        documents = torch.from_numpy(np.stack(made)).long()
        for bonus in args.sticky:
            recording = record(model, args, bonus, documents)
            check(recording)
            for multiple in args.buffers:
                found.append({"task": task, **cell(recording, multiple, args)})
                print(json.dumps(found[-1]), flush=True)
    if args.out:
        args.out.write_text("".join(f"{json.dumps(line)}\n" for line in found))


if __name__ == "__main__":
    main()
