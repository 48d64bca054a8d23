"""The command ``topkv eval``. Torch is imported when it is run."""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter
from typing import Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from topkv.config.layers import show_ranges
from topkv_cli.options import (
    DEVICE,
    IMPL,
    JSON,
    TRUST,
    Numbers,
    answering,
    device_or_default,
    quiet_transformers,
)
from topkv_evaluation.commands import dtype_option, model_option, stats_option
from topkv_evaluation.eval import ALGORITHMS, BUDGETS, LEAST_STEPS, QUESTIONS
from topkv_evaluation.tasks.scoring import SCORINGS
from topkv_evaluation.tasks.splits import MOST, STARTS, TUNING


@click.command("eval", short_help="Compare algorithms by right answers and attention mass.")
@model_option
@dtype_option
@TRUST
@click.option(
    "--tasks",
    "--task",
    multiple=True,
    show_default="facts for a model of bytes, such as that checkpoint, else ruler",
    help="facts, text, texts (all of texts:prose, :code, :tables and :dialogue, fetched once), "
    "near_keys, walk, four_digits, lookup, copy, ruler (all that needs no data set), ruler:NAME, "
    "ruler:qa_1:FILE, or a file of questions: your own, RULER's or LongBench's; name,name or "
    "given again.",
)
@click.option(
    "--question",
    type=click.Choice(["sparse", "dense"]),
    default="sparse",
    show_default=True,
    help="How questions are read: token by token through the selection, or with their context.",
)
@click.option(
    "--scoring",
    type=click.Choice([*SCORINGS]),
    help="Of answers to a file's questions; by default that of its format.",
)
@click.option(
    "--chat-template/--no-chat-template",
    default=True,
    help="Ask by the chat template of the tokenizer, if it has one; on by default.",
)
@click.option(
    "--forced",
    type=click.IntRange(0),
    default=32,
    show_default=True,
    help="Questions of a task whose logits are compared with those of dense attention.",
)
@click.option(
    "--algorithms",
    multiple=True,
    show_default=f"those installed of {ALGORITHMS.format(steps=LEAST_STEPS)}; "
    "deepseek_dsa alone, or trained_gate as well, if the model has an indexer",
    help="name:key=value,key=value,name; keys: parameters, unit, scope, buffer, eviction, "
    "host_format, share, stages (NAME/key=value+NAME). ROW@name:... names its row; {steps} is "
    "what the longest question needs.",
)
@click.option(
    "--contexts",
    type=Numbers(),
    help="Tokens of the contexts, such as 8192,16384; by default 4096, or fewer that the "
    "model has positions for. A file has its own.",
)
@click.option(
    "--depths",
    type=Numbers(0, 100),
    help="Percentages such as 0,25,50,75,100: the needle stands at each depth in turn, in tasks "
    "that ask for one.",
)
@click.option(
    "--split",
    type=click.Choice([*STARTS]),
    default=TUNING,
    show_default=True,
    help="Which questions are made: those to choose by, or those to report on.",
)
@click.option("--budgets", default=BUDGETS, show_default=True)
@click.option(
    "--questions",
    type=click.IntRange(1),
    default=QUESTIONS,
    show_default=True,
    help="Of each task and context; 200 leave an interval of 7 points to either side, 20 of 20.",
)
@click.option(
    "--per-context",
    type=click.IntRange(1),
    default=25,
    show_default=True,
    help="Most questions about one context; it is read once for them.",
)
@click.option(
    "--dense-layers",
    multiple=True,
    default=("none",),
    show_default=True,
    help="none, or layers such as 0-1; may be given again.",
)
@click.option("--backend", default="triton_attention", show_default=True)
@IMPL
@DEVICE
@click.option(
    "--batch",
    type=click.IntRange(1),
    help="Questions decoded together; 256 on a GPU and 32 on a CPU by default.",
)
@click.option("--seed", type=click.IntRange(0, MOST - 1), default=0, show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="For results and the report; a run goes on with what is there.",
)
@stats_option
@JSON
def evaluate(
    stats: bool, as_json: bool, device: str | None, out: Path | None, **options: Any
) -> None:
    """Compare algorithms: right answers and attention mass by budget, beside dense attention.

    A context is read once, with dense attention (by its indexer's selection, if the model has
    one); every token of a question and of its answer is a sparse decode step over a fork of it.
    A case that an algorithm refuses is a row with the reason.
    """
    console = Console(stderr=True)
    with answering() as stdout:
        console.print("loading torch and the model ...", style="dim")
        from topkv_evaluation.eval import page, plot
        from topkv_evaluation.eval.options import Options
        from topkv_evaluation.eval.plan import Plan
        from topkv_evaluation.eval.results import Results

        with quiet_transformers():
            plan = Plan.of(Options(device=device_or_default(device), **options))
            results = Results(out)
            _run(plan, results, console, stats)
        rows = [results.rows[key] for key in plan.keyed()]
        plan.check(rows)
        if out is not None:
            page.write([*results.rows.values()], out / page.REPORT)
            click.echo(f"the report is {out / page.REPORT}", err=True)
            if not plot.can_draw():
                fix = f"pip install 'topkv-evaluation[plot]' and {page.REWRITE} {out}"
                click.echo(f"no pictures without matplotlib: {fix}", err=True)
        if as_json:
            shown = {"settings": plan.settings(), "cells": rows}
            click.echo(json.dumps(shown, indent=2), file=stdout)
        else:
            from topkv_evaluation.eval.report import show

            show(rows, Console(file=stdout))


def _run(plan: Any, results: Any, console: Console, stats: bool) -> None:
    """Run the missing cells, and keep each as soon as it is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    columns += (TextColumn("questions"), TimeElapsedColumn(), TimeRemainingColumn())
    sizes = {key: len(cell.task.questions) for key, cell in plan.keyed().items()}
    there = {*sizes} & results.done()
    if there:
        console.print(f"{len(there)} of {len(sizes)} cells are done already", style="dim")
    click.echo(plan.announced(there), err=True)
    gone, lines = sum(sizes[key] for key in there), Lines(len(sizes) - len(there))
    # A bar that nobody sees would be written once, at the end.
    bars = Progress(*columns, console=console, disable=not console.is_terminal)
    with bars as progress:
        shown = progress.add_task("", total=sum(sizes.values()))
        progress.advance(shown, gone)

        def begin(cell: Any) -> None:
            text = f"{cell.task.name}: {cell.label} {100 * cell.share:g}%"
            progress.update(shown, description=text.ljust(32), completed=gone)

        def advance(questions: int) -> None:
            progress.advance(shown, questions)

        for row in plan.run(there, begin, advance):
            if not stats:
                row.pop("stats", None)
            results.add(row)
            # A refused cell has answered no question.
            gone += sizes[row["key"]]
            progress.update(shown, completed=gone)
            line = lines.of(row)
            if not console.is_terminal:
                click.echo(line, err=True)


class Lines:
    """Makes a line for each finished cell, with the time that the others will take.

    Args:
        cells: cells that are to be run.
    """

    def __init__(self, cells: int) -> None:
        self.cells, self.done, self.began = cells, 0, perf_counter()

    def of(self, row: dict[str, Any]) -> str:
        """Return the line of the next cell."""
        self.done += 1
        seconds = (perf_counter() - self.began) / self.done * (self.cells - self.done)
        minutes = f"{seconds // 60:.0f}:{seconds % 60:02.0f}"
        what = f"{row['task']}: {row['algorithm']} {row['nominal_percent']:g}%"
        dense = show_ranges(row["dense_layers"])
        found = f"refused: {row['refused']}" if "refused" in row else _found(row)
        where = f", layers {dense} dense" if dense and row["plugin"] else ""
        took = f"{row['seconds']:.1f} s, about {minutes} left"
        return f"{self.done}/{self.cells} {what}{where}: {found}; {took}"


def _found(row: dict[str, Any]) -> str:
    """Return right answers, or for plain text the divergence from dense attention."""
    if row["correct"] is None:
        return "nothing compared" if row["kl"] is None else f"KL {row['kl']:.4f}"
    return f"{row['correct']:g} of {row['questions']} right"
