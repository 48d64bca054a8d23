"""Report of ``topkv eval``: one file that opens offline, with tables and pictures in it.

``python -m topkv_evaluation.eval.page DIR`` writes it anew from the results of a folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from topkv.config.layers import show_ranges
from topkv_evaluation.eval import plot
from topkv_evaluation.eval.results import read_rows

REPORT = "report.html"
REWRITE = "python -m topkv_evaluation.eval.page"

Row = dict[str, Any]

STYLE = """
body { font: 15px/1.45 sans-serif; margin: 2em auto; max-width: 80em; padding: 0 1em; }
table { border-collapse: collapse; font-size: 13px; margin: 1em 0; }
th, td { padding: .25em .6em; text-align: right; border-bottom: 1px solid #ddd; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
small { color: #666; } svg { max-width: 100%; height: auto; }
"""

COLUMNS = (
    "algorithm", "dense layers", "budget", "KiB read a token", "KiB fetched a token", "right",
    "KL to dense", "NLL change", "same best token", "attention mass held", "best possible",
)  # fmt: skip

NOTES = (
    "Brackets hold 95 % intervals: of right answers Wilson's, of the others by bootstrap over "
    "contexts; none where there is one context.",
    "Budget: attended tokens of a lane. KiB read: keys, values and representations that one "
    "decode step reads from device memory, in all layers; fetched: over the link from the host.",
    "KL, change of the negative log-likelihood and agreement are of logits beside those of dense "
    "attention while the right answer is fed, in nats a token.",
)


def _figure(row: Row, name: str, low: str, high: str, form: str, scale: float = 1) -> str:
    if row.get(name) is None:
        return ""
    text = form.format(scale * row[name])
    if row.get(low) is None:
        return text
    ends = " to ".join(form.format(scale * row[end]) for end in (low, high))
    return f"{text} <small>[{ends}]</small>"


def _cells(row: Row) -> list[str]:
    dense = show_ranges(row["dense_layers"]) or "none"
    head = [escape(row["algorithm"]), dense, f"{row['budget_tokens']}"]
    return [
        f"{head[0]}", head[1], f"{head[2]} <small>({row['nominal_percent']:g}%)</small>",
        f"{row['device_bytes_per_token'] / 1024:.1f}",
        f"{row['link_bytes_per_token'] / 1024:.1f}",
        _figure(row, "accuracy", "ci_low", "ci_high", "{:.1f}%", 100),
        _figure(row, "kl", "kl_low", "kl_high", "{:.4f}"),
        _figure(row, "nll_change", "nll_change_low", "nll_change_high", "{:+.4f}"),
        _figure(row, "agreement", "agreement_low", "agreement_high", "{:.1f}%", 100),
        _figure(row, "recall", "recall_low", "recall_high", "{:.1f}%", 100),
        "" if row["exact_recall"] is None else f"{100 * row['exact_recall']:.1f}%",
    ]  # fmt: skip


def _table(rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    body = "".join(
        f"<tr>{''.join(f'<td>{cell}</td>' for cell in _cells(row))}</tr>"
        for row in rows
        if "refused" not in row
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _refusals(rows: Sequence[Row]) -> str:
    lines = [
        f"<li>{escape(plot.label_of(row))} at {row['budget_tokens']} tokens: "
        f"{escape(row['refused'])}</li>"
        for row in rows
        if "refused" in row
    ]
    return f"<p>Refused:</p><ul>{''.join(lines)}</ul>" if lines else ""


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
    return f"<h2>{escape(title)}</h2>{counts}{picture}{_table(rows)}{_refusals(rows)}"


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
    notes = "".join(f"<p><small>{note}</small></p>" for note in NOTES)
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
