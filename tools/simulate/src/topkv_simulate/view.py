"""Output of ``topkv simulate`` without ``--json``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from topkv_cli.tables import show_table
from topkv_simulate.curve import Curve, Point

COLUMNS = (
    "buffer",
    "of selection",
    "policy",
    "hits",
    "misses a step",
    "MB a step",
    "p95",
    "MB of buffer",
)


def show(
    curve: Curve,
    points: Sequence[Point],
    best: int | None,
    link: tuple[float | None, int],
    gain: float,
    console: Console,
) -> None:
    """Print the table, the counts that it was checked against, and the buffer that pays.

    Args:
        curve: curve of the trace.
        points: points in the order of the rows.
        best: recommended buffer, tokens.
        link: GB/s or None, and how many requests share it.
        gain: see ``Curve.recommend``, in %.
    """
    rate, requests = link
    several = curve.tokens_per_step > 1
    last = (*(("MB a token",) if several else ()), *(() if rate is None else ("ms of link",)))
    rows = []
    for point in points:
        mean, steps = point.bytes.mean() / 1e6, len(point.bytes)
        cells = [
            str(point.buffer),
            f"{point.buffer / curve.least:.2f}",
            point.policy,
            f"{100 * point.hit_rate:.2f}%",
            f"{point.misses / steps:.1f}",
            f"{mean:.3f}",
            f"{point.p95 / 1e6:.3f}",
            f"{point.device / 1e6:.3f}",
        ]
        cells += [f"{point.bytes_per_token / 1e6:.3f}"] if several else []
        cells += [] if rate is None else [f"{point.load_ms(rate, requests):.4g}"]
        rows.append(cells)
    show_table(console, (*COLUMNS, *last), rows, left=("policy",))
    console.print()
    counts, own = curve.totals(), curve.trace.settings["eviction"]
    was = "/".join(map(str, sorted(set(curve.recorded))))
    lines = [
        f"recorded: buffer {was}, {own}, {counts['steps']} steps; the {counts['hits']} hits and "
        f"{counts['misses']} misses that the coordinator counted, warming included, are replayed "
        "exactly",
        "a step is one request's part of a forward; misses and MB (10^6 bytes) of all layers and "
        "lanes",
    ]
    if several:
        lines.append(
            f"a mean step has {curve.tokens_per_step:.3g} tokens, which share a selection; those "
            "that were rejected count as tokens"
        )
    if rate is not None:
        lines.append(f"ms of link: bytes of {requests} mean steps over {rate:g} GB/s")
    rule = (
        f"doubling spares less than {gain:g} % of the selected units for each selection that it "
        f"adds ({own})"
    )
    if any(shape.params.get("sticky") for shape in curve.shapes):
        lines.append(
            "sticky selection preferred what the recorded buffer held: in another buffer others "
            "would be selected, and fewer missed; record with the buffer that you want"
        )
    if best is None:
        lines.append(f"no buffer is recommended: there is none here of which {rule}")
    else:
        lines.append(f"recommended: buffer {best}, the smallest here of which {rule}")
    for line in lines:
        console.print(Text(line), soft_wrap=True)
