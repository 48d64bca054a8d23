"""Questions about contexts: those of the checkpoint that comes with this package, or a file's."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topkv.errors import ConfigError
from topkv_evaluation.retrieval import ASK_BYTES, VALUE_DIGITS, ask, make_prompt

SLACK = 2
"""Tokens that an answer may be longer than the tokenizer makes it on its own."""

FIELDS = ("context", "question", "answer")


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        context: number of its context in the task.
        tokens: of the question, at least one.
        new_tokens: tokens that are generated for the answer.
        expected: the right answer; an answer that begins with it is right.
    """

    context: int
    tokens: tuple[int, ...]
    new_tokens: int
    expected: str

    @property
    def steps(self) -> int:
        """Decode steps: the last token of the answer is never fed."""
        return len(self.tokens) + self.new_tokens - 1


@dataclass(frozen=True)
class Task:
    """Contexts, and questions about them in the order of their contexts.

    Attributes:
        name: what the questions are.
        contexts: token ids of each.
        questions: see ``Question``.
        decode: token ids to text.
    """

    name: str
    contexts: tuple[tuple[int, ...], ...]
    questions: tuple[Question, ...]
    decode: Callable[[Sequence[int]], str]

    @property
    def length(self) -> int:
        """Tokens of the longest context."""
        return max(map(len, self.contexts))

    @property
    def steps(self) -> int:
        """Most decode steps of a question."""
        return max(question.steps for question in self.questions)

    def is_right(self, question: Question, tokens: Sequence[int]) -> bool:
        """Whether generated tokens begin with the expected answer, space around it aside."""
        return self.decode(tokens).strip().startswith(question.expected)


def _of_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("latin-1")


def retrieval_task(length: int, questions: int, per_context: int = 25, seed: int = 0) -> Task:
    """Documents of exactly ``length`` tokens with planted facts, each of which is asked for once.

    No fact lies in the first 256 tokens or in the last third, see ``retrieval.make_prompt``.

    Args:
        length: tokens of a context.
        questions: in all, spread evenly over the contexts.
        per_context: most questions about a context, and so most facts in it.
        seed: of the first context; the others count on from it.

    Raises:
        ConfigError: so many facts do not fit into a context.
    """
    count = -(-questions // per_context)
    contexts, asked = [], []
    for index in range(count):
        facts = questions * (index + 1) // count - questions * index // count
        try:
            document = make_prompt(length + ASK_BYTES, facts=facts, seed=seed + index)
        except (ValueError, FileNotFoundError) as error:
            what = f"no context of {length} tokens can be made"
            raise ConfigError(what, [str(error)]) from error
        contexts.append(tuple(document.tokens[:-ASK_BYTES].tolist()))
        asked += [
            Question(index, tuple(ask(fact.key).encode()), VALUE_DIGITS, fact.value)
            for fact in document.facts
        ]
    name = f"facts in {length} bytes of source code"
    return Task(name, tuple(contexts), tuple(asked), _of_bytes)


def file_task(path: Path, tokenizer: Any, questions: int) -> Task:
    """The first lines ``{"context", "question", "answer"}`` of a file, one JSON object a line.

    Lines with the same context share it. The tokenizer's special tokens go before contexts alone.

    Raises:
        ConfigError: the file cannot be read, or a line is none of these.
    """
    what = f"the task {path} is refused"
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(what, [f"it cannot be read: {error}"]) from error
    if not lines:
        raise ConfigError(what, ['it is empty; expected lines {"context", "question", "answer"}'])
    reasons: list[str] = []
    asked: dict[str, list[Question]] = {}
    for number, line in enumerate(lines[:questions], start=1):
        item = _item(line, number, reasons)
        if item is None:
            continue
        context, text, answer = item
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        new = len(tokenizer(answer, add_special_tokens=False)["input_ids"]) + SLACK
        if not tokens:
            reasons.append(f"line {number}: the question has no token")
        about = asked.setdefault(context, [])
        about.append(Question(list(asked).index(context), tuple(tokens), new, answer.strip()))
    contexts = tuple(tuple(tokenizer(text)["input_ids"]) for text in asked)
    reasons += [f"context {i} has no token" for i, tokens in enumerate(contexts) if not tokens]
    if reasons:
        raise ConfigError(what, reasons)
    ordered = tuple(question for about in asked.values() for question in about)

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    return Task(path.name, contexts, ordered, decode)


def _item(line: str, number: int, reasons: list[str]) -> tuple[str, str, str] | None:
    try:
        item = json.loads(line)
    except ValueError as error:
        reasons.append(f"line {number} is no JSON: {error}")
        return None
    wrong = [
        name
        for name in FIELDS
        if not isinstance(item, dict) or not isinstance(item.get(name), str) or not item[name]
    ]
    if wrong:
        reasons.append(f"line {number}: expected an object with texts {FIELDS}, lacks {wrong}")
        return None
    return item["context"], item["question"], item["answer"]
