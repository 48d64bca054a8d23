"""Output of ``topkv share`` without ``--json``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from topkv_cli.tables import show_table


def show(result: dict[str, Any], console: Console) -> None:
    """Print the mass that each pair of layers would share, the best patterns, and the setting."""
    layers = [str(layer) for layer in result["layers"]]
    console.print(Text("of its own mass, what a layer (column) finds in the selection of another"))
    show_table(console, ("selects", *layers), _similarities(layers, result))
    console.print()
    rows = [
        (
            ">" if each["selecting"] == result["selecting"] else "",
            each["share"],
            str(each["selecting"]),
            f"{each['loss']:.4f}",
            f"{100 * each['mass']:.1f}%",
        )
        for each in result["patterns"]
    ]
    show_table(console, ("", "share", "selecting", "loss", "mass"), rows, left=("", "share"))
    console.print()
    for line in (
        f"{result['algorithm']}, budget {result['budget_tokens']}, {result['prompts']} prompts",
        "of its own mass: of the query that finds least, mean of lanes and prompts",
        "effect: 1 - cos(x, x + attention) of the residual stream x, mean of queries and prompts",
        "loss: effect times what is not found, mean of layers",
        "mass: attention mass that all layers would hold, mean of queries too",
        f"share: {json.dumps(result['config']['share'])}",
    ):
        console.print(Text(line), soft_wrap=True)


def _similarities(layers: Sequence[str], result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for layer, row in zip(layers, result["similarity"], strict=True):
        yield layer, *("" if value is None else f"{value:.3f}" for value in row)
    yield "effect", *(f"{value:.3f}" for value in result["effect"])
