"""Presses of kvpress on the questions of ``topkv eval``: rows of the same table.

    python tools/evaluation/scripts/kvpress_rows.py --tasks facts --contexts 4096 --out results/

Takes the options of ``topkv eval`` that say what is asked, and adds to the ``results.jsonl`` of
the folder that it names. A press sees the context alone, as an algorithm does with ``--question
sparse``; tokens that it throws away are gone for every question. Needs kvpress, which is installed
without its pins: ``pip install --no-deps kvpress cachetools peft fire``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from topkv.errors import TopkvError
from topkv_evaluation.eval import page
from topkv_evaluation.eval.cells import Cell, Grid, Row, described
from topkv_evaluation.eval.choices import Choice, read_budgets, read_dense_layers
from topkv_evaluation.eval.forced import Compared, Forced, compare
from topkv_evaluation.eval.options import Options
from topkv_evaluation.eval.plan import Plan
from topkv_evaluation.eval.results import Results
from topkv_evaluation.eval.runs import differences_of, scores_of
from topkv_evaluation.eval.tasks import Question, Task
from topkv_transformers.support import shape_of

PRESSES = {"snapkv": "SnapKVPress", "streaming_llm": "StreamingLLMPress", "quest": "QuestPress"}
"""Presses by the name of topkv's plugin; a press that kvpress lacks is a row with the reason."""

MISSING = (
    "kvpress is not installed; pip install --no-deps kvpress cachetools peft fire puts it beside"
    " the torch and Transformers that are there"
)


def make_press(name: str, ratios: Sequence[float]) -> Any:
    """Make a press that throws away the share ``ratios`` of the context in each layer.

    Raises:
        LookupError: kvpress has no press of this name.
    """
    import kvpress

    kind = getattr(kvpress, PRESSES[name], None)
    if kind is None:
        raise LookupError(f"kvpress has no {PRESSES[name]}")
    if len({*ratios}) == 1:
        return kind(compression_ratio=ratios[0])
    return kvpress.PerLayerCompressionPress(kind(), [*ratios])


class Pressed:
    """A model, one context in its cache after a press, and questions about it.

    Args:
        model: model of Transformers, not attached.
        context: token ids.
        press: None for dense attention.
    """

    def __init__(self, model: PreTrainedModel, context: Sequence[int], press: Any) -> None:
        self.model, self.length = model, len(context)
        self.cache = DynamicCache()
        tokens = torch.tensor([context], device=model.device)
        # Transformers no longer passes on the positions by which kvpress knows a prompt.
        place = {"cache_position": torch.arange(self.length, device=model.device)}
        if press is None:
            self.first = self._read(tokens, **place)[-1]
        else:
            with press(model):
                self.first = self._read(tokens, **place)[-1]
        self.kept = [layer.keys.shape[2] for layer in self.cache.layers]

    def _read(self, tokens: Tensor, kept: int = 1, **more: Any) -> Tensor:
        return self.model(
            tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=kept, **more
        ).logits[0]

    def forget(self) -> None:
        """Forget all tokens behind the context."""
        for layer, kept in zip(self.cache.layers, self.kept, strict=True):
            layer.keys, layer.values = layer.keys[:, :, :kept], layer.values[:, :, :kept]

    def feed(self, tokens: Sequence[int], begin: int = 0) -> Tensor:
        """Return logits ``[n, V]`` behind each of the tokens, which follow ``begin`` others.

        Tokens are fed one by one where layers keep several lengths, which have no mask in common.
        """
        size, found = len(tokens) if len({*self.kept}) == 1 else 1, []
        for first in range(0, len(tokens), size):
            some = torch.tensor([[*tokens[first : first + size]]], device=self.model.device)
            at = self.length + begin + first + torch.arange(size, device=self.model.device)
            found.append(self._read(some, size, position_ids=at[None]))
        return torch.cat(found)

    def answer(self, question: Question) -> list[int]:
        """Generate the tokens of an answer greedily."""
        self.forget()
        logits = self.feed(question.tokens)[-1] if question.tokens else self.first
        written = [int(logits.argmax())][: question.new_tokens]
        while len(written) < question.new_tokens:
            begin = len(question.tokens) + len(written) - 1
            written.append(int(self.feed(written[-1:], begin)[-1].argmax()))
        return written

    def targets(self, question: Question) -> Tensor:
        """Feed a question's targets, and return the logits before each."""
        self.forget()
        return self.feed(question.forced)[-len(question.targets) :]

    def bytes_read(self, question: Question) -> int:
        """Return the bytes that a step at the end of the question reads, in all layers."""
        each = [layer.keys[:, :, :1].nbytes * 2 for layer in self.cache.layers]
        sizes = zip(each, self.kept, strict=True)
        return sum(size * (kept + len(question.tokens)) for size, kept in sizes)


def measure(cell: Cell, grid: Grid, forced: Forced) -> Row:
    """Make the row of a press at a budget; ``forced`` keeps the logits of dense attention."""
    model, task, layers = grid.model, cell.task, shape_of(grid.model).num_layers
    answers: list[list[int]] = []
    compared: list[tuple[int, Compared]] = []
    read: list[int] = []
    for index, context in enumerate(task.contexts):
        # Half a token more: presses round what they keep down.
        share = max(0.0, 1 - (cell.budget + 0.5) / len(context))
        ratios = [0.0 if layer in cell.dense_layers else share for layer in range(layers)]
        pressed = Pressed(model, context, make_press(cell.choice.name, ratios))  # type: ignore[union-attr]
        asked = [question for question in task.questions if question.context == index]
        answers += [pressed.answer(question) for question in asked]
        read += [pressed.bytes_read(question) for question in asked]
        looked = [question for question in asked if question in forced.questions]
        dense = None if all(q in forced.dense for q in looked) else Pressed(model, context, None)
        for question in looked:
            if dense is not None:
                forced.keep(question, dense.targets(question))
            logits = pressed.targets(question)
            found = compare(logits, forced.dense[question], question.targets)
            compared.append((index, found))
    whole = sum(layer.keys[:, :, :1].nbytes * 2 for layer in pressed.cache.layers)
    return {
        "budget_percent": round(100 * cell.budget / task.length, 4),
        "index_tokens": 0.0,
        "with_index_percent": round(100 * cell.budget / task.length, 4),
        "device_bytes_per_token": round(sum(read) / len(read)),
        "link_bytes_per_token": 0,
        "context_bytes": whole * task.length,
        "questions": len(task.questions),
        "contexts": len(task.contexts),
        **scores_of(task, answers),
        **dict.fromkeys(("recall", "recall_low", "recall_high", "exact_recall", "hit_rate")),
        **differences_of(compared),
        "impl": "kvpress",
        "backend": model.config._attn_implementation,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def rows_of(plan: Plan, budgets: str, dense: Sequence[str], done: set[str]) -> Iterator[Row]:
    """Yield a row for each press, budget and set of dense layers that is not done."""
    layers = shape_of(plan.grid.model).num_layers
    skipped = [read_dense_layers(text, layers) for text in dense]
    for task in {id(cell.task): cell.task for cell in plan.cells}.values():
        forced = Forced.of(task, plan.grid.forced)
        for cell in cells_of(task, read_budgets(budgets), skipped):
            row = described(cell, plan.grid) | {"plugin": f"kvpress:{cell.choice.name}"}  # type: ignore[union-attr]
            if row["key"] in done:
                continue
            began = perf_counter()
            try:
                with torch.inference_mode():
                    row |= measure(cell, plan.grid, forced)
            except (LookupError, AssertionError, torch.OutOfMemoryError) as error:
                row["refused"] = str(error).splitlines()[0]
            yield row | {"seconds": round(perf_counter() - began, 3)}


def cells_of(
    task: Task, shares: Sequence[float], dense: Sequence[tuple[int, ...]]
) -> Iterator[Cell]:
    for name in PRESSES:
        for skipped in dense:
            for share in shares:
                yield Cell(task, Choice(f"kvpress {name}", name, 1), share, skipped)


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    usual = Options()
    parser.add_argument("--out", type=Path, required=True, help="folder of results.jsonl")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tasks", action="append", default=[])
    parser.add_argument("--contexts", type=numbers, default=())
    parser.add_argument("--depths", type=numbers)
    parser.add_argument("--split", default=usual.split)
    parser.add_argument("--budgets", default=usual.budgets)
    parser.add_argument("--questions", type=int, default=usual.questions)
    parser.add_argument("--per-context", type=int, default=usual.per_context)
    parser.add_argument("--forced", type=int, default=usual.forced)
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--dense-layers", action="append")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = vars(parse(arguments))
    out, dense = options.pop("out"), options.pop("dense_layers") or ["none"]
    if find_spec("kvpress") is None:
        print(f"error: {MISSING}", file=sys.stderr)
        return 2
    try:
        plan = Plan.of(Options(**options, algorithms=("streaming_llm",)))
        results = Results(out)
        for row in rows_of(plan, options["budgets"], dense, results.done()):
            results.add(row)
            said = row.get("refused") or f"{row['accuracy']} right, KL {row['kl']}"
            print(f"{row['task']}: {row['algorithm']} {row['nominal_percent']:g}%: {said}")
    except TopkvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    page.write([*results.rows.values()], out / page.REPORT)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
