"""RULER's needles: keys with magic values, hidden in a haystack and asked for."""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from topkv_evaluation.tasks.fitting import fitted, largest_size, total_of
from topkv_evaluation.tasks.sample import Count, Sample
from topkv_evaluation.tasks.words import compounds, haystack

NEW_TOKENS = 128
CONTEXT = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}"
)
QUESTION = "\nWhat are all the special magic {kind} for {query} mentioned in the provided text?"
PREFIX = " The special magic {kind} for {query} mentioned in the provided text are"
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = tuple(round(100 * place / 39) for place in range(40))
"""Percentages of the text where a needle may go: 40 of them, 0 and 100 included."""


@dataclass(frozen=True)
class Needles:
    """Needles of a task, and their haystack.

    Attributes:
        haystack: ``"noise"``, one sentence again and again; ``"text"``; or ``"needles"``, others.
        key, value: ``"words"``, ``"numbers"`` or ``"uuids"``.
        keys: needles with a key of their own.
        values: needles of each key; all are asked for.
        queries: keys that are asked for at once.
        depth: place of the asked needle, in percent of the haystack, if one is asked for; None
            for RULER's draw.
        digits: digits of a number; RULER's have seven.
    """

    haystack: str
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1
    depth: int | None = None
    digits: int = 7

    def at(self, depth: int) -> Needles:
        """Return the task with the asked needle at a depth."""
        return replace(self, depth=depth)

    @property
    def count(self) -> int:
        """Needles in all."""
        return max(self.keys, self.queries) * self.values

    def __call__(self, count: Count, length: int, samples: int, seed: int) -> list[Sample]:
        """Make samples of at most ``length`` tokens with generated ones; see ``sample.Count``."""
        rng = random.Random(seed)

        def make(size: int) -> Sample:
            return _sample(self, size, rng, seed)

        step = 500 if self.haystack == "text" else 25 if length >= 4096 else 5
        least = 1 if self.haystack == "text" else self.count
        per_piece = count(make(step)) / step
        bound = int(length / per_piece * 3)
        size = largest_size(total_of(make, count), length, step, bound, least)
        return [fitted(make, count, length, size, step, least) for _ in range(samples)]


def drawn(kind: str, rng: random.Random, digits: int = 7) -> str:
    """Draw a key or a value; a number has ``digits`` digits."""
    if kind == "numbers":
        return str(rng.randint(10 ** (digits - 1), 10**digits - 1))
    if kind == "words":
        return rng.choice(compounds())
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _sample(what: Needles, size: int, rng: random.Random, seed: int) -> Sample:
    keys: list[str] = []
    values: list[list[str]] = []
    needles: list[str] = []
    for _ in range(max(what.keys, what.queries)):
        keys.append(drawn(what.key, rng, what.digits))
        values.append([drawn(what.value, rng, what.digits) for _ in range(what.values)])
        needles += [_needle(what, keys[-1], value) for value in values[-1]]
    first = needles[0]
    random.Random(seed).shuffle(needles)
    if what.depth is None:
        context = _hidden(what, needles, size, rng)
        asked = rng.sample(range(len(keys)), what.queries)
    else:  # the first is as good as any
        needles.remove(first)
        context, asked = _swept(what, first, needles, size, rng), [0]
    names = [keys[i] for i in asked]
    query = f"{', '.join(names[:-1])}, and {names[-1]}" if len(names) > 1 else names[0]
    texts, kind = [CONTEXT, QUESTION, PREFIX], what.value
    if what.queries * what.values == 1:
        texts = in_singular(texts)
        kind = kind.removesuffix("s")
    said = {"kind": kind, "context": context, "query": query}
    before, question, prefix = (text.format(**said) for text in texts)
    answers = tuple(value for i in asked for value in values[i])
    return Sample(before, question, prefix, answers, NEW_TOKENS)


def in_singular(texts: Sequence[str]) -> list[str]:
    """Return the templates for one answer."""
    for plural, singular in (("Some", "A"), ("are all", "is"), ("are", "is")):
        texts = [text.replace(plural, singular) for text in texts]
    return [*texts]


def place_of(depth: int, pieces: Sequence[str]) -> int:
    """Count the pieces before a needle at a depth, in percent of their letters."""
    ends = [0, *accumulate(map(len, pieces))]
    wanted = ends[-1] * depth / 100
    return min(range(len(ends)), key=lambda place: abs(ends[place] - wanted))


def _needle(what: Needles, key: str, value: str) -> str:
    return NEEDLE.format(kind=what.value, key=key, value=value)


def _hidden(what: Needles, needles: list[str], size: int, rng: random.Random) -> str:
    if what.haystack == "text":
        return spread(needles, haystack(size), rng)
    pieces = _pieces(what, size, rng)
    places = sorted(rng.sample(range(size), len(needles)), reverse=True)
    for place, needle in zip(places, needles, strict=True):
        pieces.insert(place, needle)
    return "\n".join(pieces)


def _pieces(what: Needles, size: int, rng: random.Random) -> list[str]:
    if what.haystack == "text":
        return haystack(size)
    if what.haystack == "noise":
        return [NOISE] * size
    keys = ((drawn(what.key, rng, what.digits), drawn(what.value, rng, what.digits))
            for _ in range(size))  # fmt: skip
    return [_needle(what, key, value) for key, value in keys]


def _swept(what: Needles, asked: str, others: list[str], size: int, rng: random.Random) -> str:
    """Put needles between the pieces, ``asked`` at its depth of all of them."""
    pieces = _pieces(what, size, rng)
    for needle in others:
        pieces.insert(rng.randint(0, len(pieces)), needle)
    pieces.insert(place_of(what.depth or 0, pieces), asked)
    return (" " if what.haystack == "text" else "\n").join(pieces)


def spread(needles: list[str], sentences: list[str], rng: random.Random) -> str:
    """Put needles between sentences, each at a depth of its own, and join all by spaces."""
    drawn = rng.sample(DEPTHS, len(needles))
    places = sorted(int(len(sentences) * (depth / 100)) for depth in drawn)
    pieces, last = [], 0
    for place, needle in zip(places, needles, strict=True):
        pieces += [" ".join(sentences[last:place]), needle]
        last = place
    return " ".join([*pieces, " ".join(sentences[last:])])
