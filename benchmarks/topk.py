"""Time of exact top-k per call, beside ``torch.topk``.

    python benchmarks/topk.py --out benchmarks/results/topk.jsonl
    python benchmarks/topk.py --topk radix --others flashinfer

Every cell replays one CUDA graph of ``CALLS`` calls and reports the median over ``REPEATS``
replays. ``normal`` are normally distributed scores, ``softmax`` weights of a softmax (positive,
over many octaves), ``ties`` small integers, where no threshold separates exactly K.
``--topk`` names the installed implementation to time, ``--others`` those to time beside it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from topkv.hooks.topk import TopKSetup
from topkv.ops.topk import topk
from topkv.plugins import registry
from topkv_testing.timing import graph_us

CALLS, REPEATS = 20, 11
DISTRIBUTIONS = ("normal", "softmax", "ties")


def per_call(call: Callable[[], object]) -> float:
    return graph_us(*[call] * CALLS, repeats=REPEATS)


def make_scores(rows: int, width: int, distribution: str) -> torch.Tensor:
    scores = torch.randn(rows, width, device="cuda")
    if distribution == "softmax":
        return (scores * 4).softmax(-1)
    return (scores * 2).round() if distribution == "ties" else scores


def verify(scores: torch.Tensor, ids: torch.Tensor) -> None:
    """Assert that the ids are distinct, ascending, and of the K largest scores."""
    best = scores.topk(ids.shape[1], dim=1).values
    got = scores.gather(1, ids.long()).sort(dim=1, descending=True).values
    if not torch.equal(best, got) or not (ids[:, 1:] > ids[:, :-1]).all():
        raise SystemExit("topk selected other scores than torch.topk")


def measure(
    rows: int, width: int, select: int, distribution: str, names: Sequence[str]
) -> dict[str, object]:
    """Measure one line; ``names`` are the implementations, the first that of the column ``us``."""
    scores = make_scores(rows, width, distribution)
    lengths = torch.full((rows,), width, dtype=torch.int32, device="cuda")
    ids = torch.empty(rows, select, dtype=torch.int32, device="cuda")
    times = []
    setup = TopKSetup(rows, width, select, scores.device)
    for name in names:
        work = registry().create("topk", name, setup, "triton")
        run = partial(topk, scores, lengths, ids, impl="triton", work=work)
        times.append(round(per_call(run), 2))
        verify(scores, ids)
    return {
        "rows": rows,
        "width": width,
        "select": select,
        "scores": distribution,
        "us": times[0],
        "torch_us": round(per_call(lambda: torch.topk(scores, select, dim=1)), 2),
        **{f"{name}_us": time for name, time in zip(names[1:], times[1:], strict=True)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write JSON lines here as well")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument("--widths", type=int, nargs="+", default=[2048, 8192, 131072])
    parser.add_argument("--selects", type=int, nargs="+", default=[127, 2048])
    parser.add_argument("--topk", default="pivot", help="an installed implementation")
    parser.add_argument("--others", nargs="+", default=[], help="further ones")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.cuda.get_device_name()
    print(device)
    head = f"{'rows':>5} {'width':>7} {'select':>6} {'scores':>8} {'us':>9} {'torch us':>9}"
    print(" ".join([head, *options.others]))
    lines, names = [], [options.topk, *options.others]
    for distribution in DISTRIBUTIONS:
        for width in options.widths:
            for select in (k for k in options.selects if k < width):
                for rows in options.rows:
                    cell = measure(rows, width, select, distribution, names)
                    lines.append(json.dumps({"what": "topk", "device": device, **cell}) + "\n")
                    others = list(cell.values())[6:]
                    line = "{:>5} {:>7} {:>6} {:>8} {:>9} {:>9}".format(*cell.values())
                    print(line, *others)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("".join(lines))


if __name__ == "__main__":
    main()
