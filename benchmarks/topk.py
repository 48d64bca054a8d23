"""Time of exact top-k per call, beside ``torch.topk``.

    python benchmarks/topk.py --out benchmarks/results/topk.jsonl
    python benchmarks/topk.py --others cuda
    python benchmarks/topk.py --sweep

Every cell replays one CUDA graph of ``CALLS`` calls and reports the median over ``REPEATS``
replays. ``normal`` are normally distributed scores, ``softmax`` weights of a softmax (positive,
over many octaves), ``ties`` small integers, where no threshold separates exactly K.
``--others`` names installed implementations of exact top-k to time beside the core's.

``--sweep`` times the kernels of long rows at other constants, one changed at a time (``base`` is
none), on ``--sweep-rows`` rows of ``--sweep-width`` scores: after the first kernel, after the
second, and all three.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from topkv.ops import topk_long
from topkv.ops.topk import topk
from topkv.plugins import registry
from topkv.testing.timing import graph_us

CALLS, REPEATS = 20, 11
DISTRIBUTIONS = ("normal", "softmax", "ties")
KERNELS = ("pivot_kernel", "mark_kernel", "collect_kernel")
VARIANTS: list[dict[str, int]] = [
    {},
    {"SLACK": 8},
    {"SLACK": 4},
    {"SLACK": 4, "PIVOT_SIGMAS": 3.5},
    {"SAMPLES": 1024, "PIVOT_WARPS": 4},
    {"SAMPLES": 2048},
    {"SAMPLES": 8192},
    {"PIVOT_WARPS": 4},
    {"PIVOT_WARPS": 8},
    {"PIVOT_WARPS": 32},
    {"SAMPLES": 2048, "PIVOT_WARPS": 8},
    {"SLICE": 2048, "MARK_WARPS": 4},
    {"SLICE": 4096, "MARK_WARPS": 4},
    {"SLICE": 4096, "MARK_WARPS": 8},
    {"SLICE": 8192, "MARK_WARPS": 16},
    {"SLICE": 16384, "MARK_WARPS": 8},
    {"COLLECT_WARPS": 16},
    {"WORD_BLOCK": 4096},
    {"WORD_BLOCK": 4096, "COLLECT_WARPS": 16},
    {"WORD_BLOCK": 1024},
    {"EARLY": 0},
]


def per_call(call: Callable[[], object]) -> float:
    return graph_us(*[call] * CALLS, repeats=REPEATS)


def make_scores(rows: int, width: int, distribution: str) -> torch.Tensor:
    scores = torch.randn(rows, width, device="cuda")
    if distribution == "softmax":
        return (scores * 4).softmax(-1)
    return (scores * 2).round() if distribution == "ties" else scores


def verify(scores: torch.Tensor, ids: torch.Tensor) -> None:
    """The ids are distinct, ascending, and carry the K largest scores."""
    best = scores.topk(ids.shape[1], dim=1).values
    got = scores.gather(1, ids.long()).sort(dim=1, descending=True).values
    if not torch.equal(best, got) or not (ids[:, 1:] > ids[:, :-1]).all():
        raise SystemExit("topk selected other scores than torch.topk")


def measure(
    rows: int, width: int, select: int, distribution: str, others: Sequence[str] = ()
) -> dict[str, object]:
    """One line; ``others`` are installed implementations to time as well."""
    scores = make_scores(rows, width, distribution)
    lengths = torch.full((rows,), width, dtype=torch.int32, device="cuda")
    ids = torch.empty(rows, select, dtype=torch.int32, device="cuda")
    time = per_call(lambda: topk(scores, lengths, ids, impl="triton"))
    verify(scores, ids)
    times = {}
    for name in others:
        work = registry().create("topk", name, rows, width, select, scores.device)
        run = partial(topk, scores, lengths, ids, impl="triton", work=work)
        times[f"{name}_us"] = round(per_call(run), 2)
        verify(scores, ids)
    return {
        "rows": rows,
        "width": width,
        "select": select,
        "scores": distribution,
        "us": round(time, 2),
        "torch_us": round(per_call(lambda: torch.topk(scores, select, dim=1)), 2),
        **times,
    }


class _Skipped:
    """Stands in for a kernel that is not to be launched."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **options: None


def sweep_cell(rows: int, width: int, select: int, variant: dict[str, int]) -> list[float]:
    """Microseconds after one, two and all three kernels; the last result is verified."""
    scores = make_scores(rows, width, "normal")
    lengths = torch.full((rows,), width, dtype=torch.int32, device="cuda")
    ids = torch.empty(rows, select, dtype=torch.int32, device="cuda")
    with ExitStack() as changes:
        for name, value in variant.items():
            changes.enter_context(mock.patch.object(topk_long, name, value))
        times = []
        for count in range(1, len(KERNELS) + 1):
            with ExitStack() as skipped:
                for name in KERNELS[count:]:
                    skipped.enter_context(mock.patch.object(topk_long.kernels, name, _Skipped()))
                times.append(round(per_call(lambda: topk(scores, lengths, ids, impl="triton")), 2))
    verify(scores, ids)
    return times


def sweep(rows: list[int], width: int, selects: list[int]) -> None:
    print(f"{'rows':>5} {'select':>6} {'pivot':>8} {'+ mark':>8} {'+ collect':>9}  constants")
    for variant in VARIANTS:
        said = ", ".join(f"{name} {value}" for name, value in variant.items()) or "base"
        for count in rows:
            for select in selects:
                times = sweep_cell(count, width, select, variant)
                line = "{:>5} {:>6} {:>8} {:>8} {:>9}".format(count, select, *times)
                print(f"{line}  {said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write JSON lines here as well")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument("--widths", type=int, nargs="+", default=[2048, 8192, 131072])
    parser.add_argument("--selects", type=int, nargs="+", default=[127, 2048])
    parser.add_argument("--others", nargs="+", default=[], help="installed implementations")
    parser.add_argument("--sweep", action="store_true", help="time other constants instead")
    parser.add_argument("--sweep-rows", type=int, nargs="+", default=[16])
    parser.add_argument("--sweep-width", type=int, default=131072)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.cuda.get_device_name()
    print(device)
    if options.sweep:
        sweep(options.sweep_rows, options.sweep_width, options.selects)
        return
    head = f"{'rows':>5} {'width':>7} {'select':>6} {'scores':>8} {'us':>9} {'torch us':>9}"
    print(" ".join([head, *options.others]))
    lines = []
    for distribution in DISTRIBUTIONS:
        for width in options.widths:
            for select in (k for k in options.selects if k < width):
                for rows in options.rows:
                    cell = measure(rows, width, select, distribution, options.others)
                    lines.append(json.dumps({"what": "topk", "device": device, **cell}) + "\n")
                    others = list(cell.values())[6:]
                    line = "{:>5} {:>7} {:>6} {:>8} {:>9} {:>9}".format(*cell.values())
                    print(line, *others)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("".join(lines))


if __name__ == "__main__":
    main()
