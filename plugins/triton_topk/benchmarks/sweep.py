"""Time of the kernels of long rows at other constants, one changed at a time (``base`` is none).

    python plugins/triton_topk/benchmarks/sweep.py --rows 1 16

After the first kernel, after the second, and all three: each replays one CUDA graph of ``CALLS``
calls and reports the median over ``REPEATS`` replays. ``benchmarks/topk.py`` of the repository
times the whole beside other implementations.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from unittest import mock

import torch

from topkv.hooks.topk import TopKSetup
from topkv.ops.topk import topk
from topkv_testing.timing import graph_us
from topkv_triton_topk import launch
from topkv_triton_topk.topk import PivotTopK

CALLS, REPEATS = 20, 11
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


class _Skipped:
    """Stands in for a kernel that is not to be launched."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **options: None


def sweep_cell(rows: int, width: int, select: int, variant: dict[str, int]) -> list[float]:
    """Microseconds after one, two and all three kernels; the last result is verified."""
    scores = torch.randn(rows, width, device="cuda")
    lengths = torch.full((rows,), width, dtype=torch.int32, device="cuda")
    ids = torch.empty(rows, select, dtype=torch.int32, device="cuda")
    with ExitStack() as changes:
        for name, value in variant.items():
            changes.enter_context(mock.patch.object(launch, name, value))
        # Made under these constants: they decide how much scratch there is.
        work = PivotTopK(TopKSetup(rows, width, select, scores.device))
        run = partial(topk, scores, lengths, ids, impl="triton", work=work)
        times = []
        for count in range(1, len(KERNELS) + 1):
            with ExitStack() as skipped:
                for name in KERNELS[count:]:
                    skipped.enter_context(mock.patch.object(launch.kernels, name, _Skipped()))
                times.append(round(graph_us(*[run] * CALLS, repeats=REPEATS), 2))
    best = scores.topk(select, dim=1).values
    if not torch.equal(best, scores.gather(1, ids.long()).sort(dim=1, descending=True).values):
        raise SystemExit("topk selected other scores than torch.topk")
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
    parser.add_argument("--rows", type=int, nargs="+", default=[16])
    parser.add_argument("--width", type=int, default=131072)
    parser.add_argument("--selects", type=int, nargs="+", default=[127, 2048])
    options = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name())
    sweep(options.rows, options.width, options.selects)


if __name__ == "__main__":
    main()
