"""Questions about contexts, as tokens."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from topkv.errors import ConfigError
from topkv_evaluation.retrieval import ASK_BYTES, VALUE_DIGITS, ask, make_prompt
from topkv_evaluation.tasks.files import AS_ANSWER
from topkv_evaluation.tasks.prompts import Prompts
from topkv_evaluation.tasks.sample import Sample
from topkv_evaluation.tasks.scoring import SCORINGS
from topkv_evaluation.tasks.splits import STARTS, TUNING, seed_of
from topkv_evaluation.tasks.texts import text_of, windows
from topkv_evaluation.tasks.words import haystack

SLACK = 2
"""Tokens by which an answer may be longer than the tokenizer makes it on its own."""

MOST_FORCED = 32
"""Tokens of the right answer that are fed when logits are compared."""

TEXT_TOKENS = 64
"""Tokens of plain text that are predicted behind a context."""

TURN = 512
"""Tokens of the haystack in which one split predicts, before the other's turn."""


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        context: number of its context in the task.
        tokens: tokens of the question; none where its context ends with it.
        new_tokens: tokens that are generated for the answer; 0 where nothing is asked.
        answers: right ones, as the scoring of the task wants them.
        reference: tokens of a right answer, which are fed when logits are compared; may be empty.
    """

    context: int
    tokens: tuple[int, ...]
    new_tokens: int
    answers: tuple[str, ...] = ()
    reference: tuple[int, ...] = ()

    @property
    def forced(self) -> tuple[int, ...]:
        """Tokens that are fed when logits are compared: the question's, then the reference's but
        the last, each of which predicts one of ``targets``."""
        return (*self.tokens, *self.reference[:-1])

    @property
    def targets(self) -> tuple[int, ...]:
        """Tokens that sparse steps predict: the context gives the first one, if it ends with the
        question."""
        return self.reference if self.tokens else self.reference[1:]

    @property
    def steps(self) -> int:
        """Most decode steps: the last token of the answer is never fed."""
        return max(len(self.tokens) + self.new_tokens - 1, len(self.forced))


@dataclass(frozen=True)
class Task:
    """Contexts, and questions about them in the order of their contexts.

    Attributes:
        name: what the questions are.
        contexts: token ids of each.
        questions: see ``Question``.
        decode: token ids to text.
        scoring: name of a score, see ``tasks.scoring.SCORINGS``.
        stop: token ids that end an answer.
        about: family, split, length and depth of a task that is made by them, for its rows.
    """

    name: str
    contexts: tuple[tuple[int, ...], ...]
    questions: tuple[Question, ...]
    decode: Callable[[Sequence[int]], str]
    scoring: str = "starts"
    stop: frozenset[int] = frozenset()
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens of the longest context."""
        return max(map(len, self.contexts))

    @property
    def steps(self) -> int:
        """Most decode steps of a question."""
        return max(question.steps for question in self.questions)

    @cached_property
    def digest(self) -> str:
        """A checksum of all tokens and answers, by which results are known again."""
        found = hashlib.sha256()
        for context in self.contexts:
            found.update(np.array([len(context), *context], dtype=np.int64).tobytes())
        rest = (self.questions, self.scoring, sorted(self.stop))
        found.update(repr(rest).encode())
        return found.hexdigest()[:16]

    def score(self, question: Question, tokens: Sequence[int]) -> float:
        """Score generated tokens from 0 to 1, up to the first one that ends an answer."""
        ends = [place for place, token in enumerate(tokens) if token in self.stop]
        text = self.decode(tokens[: ends[0]] if ends else tokens)
        return SCORINGS[self.scoring](text, question.answers)

    def with_questions_read(self) -> Task:
        """Return the task with each question at the end of a context of its own, read with it."""
        contexts = tuple((*self.contexts[q.context], *q.tokens) for q in self.questions)
        questions = tuple(
            replace(question, context=place, tokens=())
            for place, question in enumerate(self.questions)
        )
        return replace(self, contexts=contexts, questions=questions)


def _of_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("latin-1")


def retrieval_task(length: int, questions: int, per_context: int = 25, seed: int = 0) -> Task:
    """Make documents of exactly ``length`` tokens with planted facts, each asked for once.

    No fact is in the first 256 tokens or in the last third, see ``retrieval.make_prompt``.

    Args:
        length: tokens of a context.
        questions: in all, spread evenly over the contexts.
        per_context: most questions about a context, and so most facts in it.
        seed: seed of the first context; the others count on from it.

    Raises:
        ConfigError: the facts do not fit into a context.
    """
    count = -(-questions // per_context)
    contexts, asked = [], []
    for index in range(count):
        facts = questions * (index + 1) // count - questions * index // count
        try:
            document = make_prompt(length + ASK_BYTES, facts=facts, seed=seed + index)
        except ValueError as error:
            what = f"no context of {length} tokens can be made"
            raise ConfigError(what, [str(error)]) from error
        contexts.append(tuple(document.tokens[:-ASK_BYTES].tolist()))
        asked += [
            Question(
                index,
                tuple(ask(fact.key).encode()),
                VALUE_DIGITS,
                (fact.value,),
                tuple(fact.value.encode()),
            )
            for fact in document.facts
        ]
    name = f"facts in {length} bytes of source code"
    return Task(name, tuple(contexts), tuple(asked), _of_bytes)


def text_task(
    length: int, questions: int, prompts: Prompts, seed: int = 0, split: str = TUNING
) -> Task:
    """Make a task of plain text: nothing is asked, so only logits are compared.

    Windows of the haystack of the package, ``length`` tokens each, at places that the seed
    draws; the 64 tokens behind a window are predicted. They are of another part of the haystack
    for each split, by turns; windows of both may overlap.

    Raises:
        ConfigError: the haystack has fewer tokens.
    """
    tokens = prompts.encode(" ".join(haystack(1 << 30, once=True)))
    room = len(tokens) - length - TEXT_TOKENS - 1
    if room < 0:
        most = len(tokens) - TEXT_TOKENS - 1
        raise ConfigError(
            f"no text of {length} tokens can be made", [f"the haystack has {most}; ask for fewer"]
        )
    rng = random.Random(seed_of(split, seed))
    turn = [*STARTS].index(split)
    fit = [
        start
        for start in range(room + 1)
        if (start + length) // TURN % 2 == turn and (start + length) % TURN < TURN - TEXT_TOKENS
    ]
    if not fit:
        raise ConfigError(
            f"no text of {length} tokens can be made",
            [f"the haystack has too few tokens for the split {split}; ask for fewer"],
        )
    return _continued(f"text, {length} tokens", tokens, rng.choices(fit, k=questions), length)


def texts_task(kind: str, length: int, questions: int, prompts: Prompts, split: str) -> Task:
    """Make a task of text of a kind, see ``tasks.texts``; otherwise as ``text_task``.

    Raises:
        ConfigError: the split has fewer tokens of that kind, or they cannot be fetched.
    """
    tokens = prompts.encode(text_of(kind))
    starts = windows(len(tokens), length, TEXT_TOKENS + 1, questions, split)
    return _continued(f"{kind}, {length} tokens", tokens, starts, length)


def _continued(name: str, tokens: Sequence[int], starts: Sequence[int], length: int) -> Task:
    """Make a task of windows of a text, behind each of which the next tokens are predicted."""
    asked = [
        Question(place, (tokens[start + length],), 0,
                 reference=tuple(tokens[start + length + 1 :][:TEXT_TOKENS]))
        for place, start in enumerate(starts)
    ]  # fmt: skip
    contexts = tuple(tuple(tokens[start : start + length]) for start in starts)
    return Task(name, contexts, tuple(asked), lambda tokens: "")


def sample_task(
    name: str, samples: Sequence[Sample], scoring: str, prompts: Prompts, stop: frozenset[int]
) -> Task:
    """Make a task of samples as tokens. Samples with the same context share it.

    Raises:
        ConfigError: a context or a question has no token.
    """
    places: dict[tuple[int, ...], int] = {}
    asked: list[Question] = []
    reasons = []
    for number, sample in enumerate(samples, start=1):
        context, question = prompts.tokens(sample)
        parts = {"context": context, "question": question}
        reasons += [f"{what} {number} has no token" for what, part in parts.items() if not part]
        new_tokens = sample.new_tokens
        if new_tokens == AS_ANSWER:
            new_tokens = max(len(prompts.encode(each)) for each in sample.answers) + SLACK
        reference = _reference(sample, scoring, prompts)
        place = places.setdefault(context, len(places))
        asked.append(Question(place, question, new_tokens, sample.answers, reference))
    if reasons:
        raise ConfigError(f"the task {name} is refused", reasons)
    ordered = tuple(sorted(asked, key=lambda question: question.context))

    def decode(tokens: Sequence[int]) -> str:
        return str(prompts.tokenizer.decode(tokens, skip_special_tokens=True))

    return Task(name, tuple(places), ordered, decode, scoring, stop)


def _reference(sample: Sample, scoring: str, prompts: Prompts) -> tuple[int, ...]:
    """Return the right answer's tokens: all answers where all are wanted, else the first."""
    joined = scoring in ("all", "order")
    text = ", ".join(sample.answers) if joined else sample.answers[0]
    before = sample.question + sample.prefix
    begins = prompts.chat and not sample.prefix  # a turn of its own
    space = "" if begins or before[-1:].isspace() or text[:1].isspace() else " "
    return prompts.encode(space + text)[:MOST_FORCED]


def stops_of(tokenizer: Any, model: Any) -> frozenset[int]:
    """Return token ids that end an answer, by tokenizer and generation settings."""
    found = [getattr(tokenizer, "eos_token_id", None)]
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found += named if isinstance(named, list) else [named]
    return frozenset(token for token in found if token is not None)
