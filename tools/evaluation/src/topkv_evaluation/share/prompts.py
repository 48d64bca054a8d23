"""Prompts for ``topkv share``: questions with their answers, or pieces of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topkv.errors import ConfigError
from topkv_evaluation.eval.catalogue import BYTES, FACTS, Catalogue, read_words


@dataclass(frozen=True)
class Prompt:
    """One prompt, as token ids.

    Attributes:
        start: tokens that are read at once.
        fed: tokens that are decoded behind, one by one; none of them is generated.
        first: the first of ``fed`` whose query counts.
    """

    start: Sequence[int]
    fed: Sequence[int]
    first: int = 0

    @property
    def length(self) -> int:
        """Tokens of the whole prompt."""
        return len(self.start) + len(self.fed)


def questions(catalogue: Catalogue, words: Sequence[str]) -> list[Prompt]:
    """Make questions as ``topkv eval`` makes them to choose by.

    The queries that count are those that predict a right answer.

    Args:
        catalogue: catalogue that makes the tasks.
        words: words of ``topkv eval --tasks``; none for planted facts.

    Raises:
        ConfigError: a word names no task, or a task cannot be made, or has no answers.
    """
    if not words and catalogue.model.config.vocab_size != BYTES:
        raise ConfigError(
            "nothing to calibrate by", ["name tasks with --tasks, such as ruler, or pass --text"]
        )
    made = [
        Prompt(task.contexts[q.context], q.forced, len(q.forced) - len(q.targets))
        for task in catalogue.tasks(read_words(words or [FACTS]))
        for q in task.questions
        if q.targets
    ]
    if not made:
        raise ConfigError("nothing to calibrate by", ["no question has an answer to predict"])
    return made


def pieces(path: Path, tokenizer: Any, tokens: int, steps: int, most: int) -> list[Prompt]:
    """Cut pieces of ``tokens`` tokens, evenly spread, from a text; the last ``steps`` count.

    Raises:
        ConfigError: the text cannot be read, or has fewer tokens.
    """
    if steps >= tokens:
        raise ConfigError("--steps", [f"expected fewer than --tokens, {tokens}, got {steps}"])
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--text {path}", [f"expected a file in UTF-8; {error}"]) from error
    ids = tokenizer(text)["input_ids"]
    starts = range(0, len(ids) - tokens + 1, tokens)
    if not starts:
        why = f"expected at least --tokens, {tokens}, got {len(ids)}"
        raise ConfigError("the text is too short", [why])
    count = min(most, len(starts))
    chosen = [ids[starts[place * len(starts) // count] :][:tokens] for place in range(count)]
    return [Prompt(piece[:-steps], piece[-steps:]) for piece in chosen]
