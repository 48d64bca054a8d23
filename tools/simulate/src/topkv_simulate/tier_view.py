"""Output of ``topkv tiers`` without ``--json``, and its picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from topkv_cli.tables import show_table
from topkv_simulate.plot import saved
from topkv_simulate.tier_points import Speeds, TierPoint, max_tokens

COLUMNS = (
    "host GB",
    "storage GB",
    "write",
    "host",
    "storage",
    "computed",
    "at most",
    "first token",
    "p95",
    "GB read",
    "written",
)


def show(
    points: Sequence[TierPoint], best: TierPoint, speeds: Speeds, within: float, console: Console
) -> None:
    """Print the table, the meaning of its columns, and the sizes that suffice.

    Args:
        points: points in the order of the rows.
        best: the recommended point.
        speeds: the given speeds.
        within: see ``recommend``, in %.
    """
    show_table(console, COLUMNS, map(_cells, points), left=("write",))
    console.print()
    for line in _lines(points[0], best, speeds, within):
        console.print(Text(line), soft_wrap=True)


def _cells(point: TierPoint) -> list[str]:
    counts, size = point.counts, point.asked.object_bytes
    host, stored = sum(counts.host), sum(counts.stored)
    shares = (host, stored, point.tokens - host - stored, point.most)
    return [
        f"{point.sizes.host / 1e9:g}",
        f"{point.sizes.storage / 1e9:g}",
        point.sizes.write if point.sizes.storage else "",
        *(f"{100 * point.share(tokens):.2f}%" for tokens in shares),
        f"{point.first_ms.mean():.1f}",
        f"{point.p95:.1f}",
        f"{counts.fetched * size / 1e9:.3f}",
        f"{counts.written * size / 1e9:.3f}",
    ]


def _lines(point: TierPoint, best: TierPoint, speeds: Speeds, within: float) -> list[str]:
    asked, tokens = point.asked, point.tokens
    count = len(point.counts.asked)
    lines = [
        f"{count} prompts of {tokens} tokens, pages of {asked.page_tokens}, at most {asked.slots} "
        "at a time; shares of those tokens. No policy finds more in both tiers than at most",
        f"first token: ms, of a mean prompt and of 95 % of them; {speeds.prefill:g} tokens/s of "
        f"prompts, {1e3 * tokens / count / speeds.prefill:.1f} ms if nothing is found",
    ]
    if speeds.read is not None:
        fetched = asked.object_bytes / asked.page_tokens / speeds.read / 1e3
        computed = 1e6 / speeds.prefill
        verdict = "pays" if fetched < computed else "does not pay"
        lines.append(
            f"a token from the storage takes {fetched:.1f} us at {speeds.read:g} GB/s, a computed "
            f"one {computed:.1f}: fetching {verdict}"
        )
    sizes = f"host {best.sizes.host / 1e9:g} GB (max_tokens {max_tokens(asked, best.sizes.host)})"
    below = f"storage {best.sizes.storage / 1e9:g} GB, {best.sizes.write}"
    below = below if best.sizes.storage else "no storage"
    return [
        *lines,
        f"recommended: {sizes}, {below}; the smallest here whose mean first token comes within "
        f"{within:g} % of the best",
    ]


def draw(points: Sequence[TierPoint], best: TierPoint, path: Path) -> None:
    """Draw the mean first token over the host pool, a line for each storage and policy.

    Args:
        points: points to draw.
        best: the recommended point, which is marked.
        path: of the picture, whose ending names its format; overwritten.
    """

    def on(panel: Any) -> None:
        lines = dict.fromkeys((each.sizes.storage, each.sizes.write) for each in points)
        for index, (storage, write) in enumerate(lines):
            line = [
                each
                for each in points
                if (each.sizes.storage, each.sizes.write) == (storage, write)
            ]
            name = f"storage {storage / 1e9:g} GB, {write}" if storage else "no storage"
            sizes = [each.sizes.host / 1e9 for each in line]
            first = [float(each.first_ms.mean()) for each in line]
            panel.plot(sizes, first, marker="o", markersize=4, color=f"C{index}", label=name)
        place = best.sizes.host / 1e9, float(best.first_ms.mean())
        panel.plot(*place, "o", markersize=10, fillstyle="none", color="gray", label="recommended")
        panel.set_xscale("log", base=2)
        sizes = sorted({each.sizes.host / 1e9 for each in points})
        panel.set_xticks(sizes, [f"{size:g}" for size in sizes], rotation=45)
        panel.set_xlabel("host pool, GB")
        panel.set_ylabel("mean first token, ms")

    saved(on, path)
