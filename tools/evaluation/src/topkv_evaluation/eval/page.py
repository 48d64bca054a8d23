"""Report of ``topkv eval``: one file that opens offline, with tables and pictures in it.

``python -m topkv_evaluation.eval.page DIR`` writes it anew from the results of a folder.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console

from topkv_evaluation.eval import plot
from topkv_evaluation.eval.report import show_notes, show_tasks
from topkv_evaluation.eval.results import read_rows

REPORT = "report.html"
REWRITE = "python -m topkv_evaluation.eval.page"

Row = dict[str, Any]

STYLE = """
body { font: 15px/1.45 sans-serif; margin: 2em auto; max-width: 80em; padding: 0 1em; }
pre { font-size: 12px; overflow-x: auto; } svg { max-width: 100%; height: auto; }
"""


def _printed(show: Callable[[Sequence[Row], Console], None], rows: Sequence[Row]) -> str:
    """Return what the command prints of rows, as HTML."""
    console = Console(file=io.StringIO(), record=True)
    show(rows, console)
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def _section(title: str, rows: Sequence[Row]) -> str:
    measured = [row for row in rows if "refused" not in row]
    counts = ""
    if measured:
        first = measured[0]
        counts = (
            f"<p>{first['questions']} questions about {first['contexts']} contexts of up to "
            f"{first['context']} tokens, logits compared at {first['forced_questions']}; "
            f"{escape(first['dtype'])} on {escape(first['device'])}; data {first['data']}.</p>"
        )
    picture = plot.svg(measured) if plot.can_draw() else ""
    return f"<h2>{escape(title)}</h2>{counts}{picture}{_printed(show_tasks, rows)}"


def write(rows: Sequence[Row], path: Path) -> None:
    """Write the report.

    Args:
        rows: as in ``results.jsonl``.
        path: path of the file; overwritten.
    """
    models = list(dict.fromkeys(row["model"] for row in rows))
    sections: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        named = tuple(row[name] for name in ("model", "task", "question", "data"))
        sections.setdefault(named, []).append(row)
    parts = []
    for (model, task, question, _), of in sections.items():
        title = task if question == "sparse" else f"{task}, question read with its context"
        parts.append(_section(title if len(models) == 1 else f"{model}: {title}", of))
    if plot.can_draw() and (picture := plot.map_svg(rows)):
        parts.insert(0, f"<h2>Right answers by length and depth, %</h2>{picture}")
    if not plot.can_draw():
        parts.insert(0, f"<p>No pictures without matplotlib: install it and run "
                        f"<code>{REWRITE} {escape(str(path.parent))}</code>.</p>")  # fmt: skip
    notes = _printed(show_notes, rows)
    title = f"topkv eval: {escape(', '.join(models))}"
    path.write_text(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>{''.join(parts)}{notes}"
        "</body></html>\n",
        encoding="utf-8",
    )


def main(folder: Path) -> None:
    """Write the report of a folder anew."""
    write(read_rows(folder), folder / REPORT)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
