"""RULER's common words: a numbered list in which ten words stand far more often than others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from topkv_evaluation.tasks.fitting import Make, fitted, largest_size, total_of
from topkv_evaluation.tasks.sample import Count, Sample
from topkv_evaluation.tasks.words import compounds, single_words

NEW_TOKENS = 120
CONTEXT = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}"
)
QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
PREFIX = " Answer: The top 10 words that appear most often in the list are:"
ESTIMATE = 4096
STEP = 10
SHORT = 4096
"""Tokens below which lists are shorter and less lopsided."""


@dataclass(frozen=True)
class Shape:
    """Counts of words in a list.

    Attributes:
        often: times that each of the common words stands in the list.
        seldom: times that each of the others stands there.
        worked: number of words of the worked example, then both counts for it.
    """

    often: int = 30
    seldom: int = 3
    worked: tuple[int, int, int] = (40, 10, 3)


BRIEF = Shape(6, 1, (20, 3, 1))


@dataclass(frozen=True)
class CommonWords:
    """Lists of ``common`` words that stand there more often than the others.

    RULER shapes lists by the length in tokens alone. Where a length holds no list of its shape,
    as 4096 bytes don't, it has no sample; here one of the shape of short lengths is made. Where
    RULER goes over to a list of English words that it keeps elsewhere, at more words than there
    are nouns, adjectives and verbs, compounds of an adjective and a noun are listed.
    """

    common: int = 10
    shape: Shape = Shape()

    def __call__(self, count: Count, length: int, samples: int, seed: int) -> list[Sample]:
        """Make samples of at most ``length`` tokens with generated ones; see ``sample.Count``."""
        shape, least = self.shape, total_of(self._maker(self.shape, seed), count)
        if length < SHORT or least(self.common) > length:
            shape = BRIEF
        make = self._maker(shape, seed)
        per_word = count(make(ESTIMATE)) / ESTIMATE
        bound = int(length // per_word) * 2
        size = largest_size(total_of(make, count), length, STEP, bound, self.common)
        return [fitted(make, count, length, size, STEP, self.common) for _ in range(samples)]

    def _maker(self, shape: Shape, seed: int) -> Make:
        """Return a maker of samples with a list of N words; draws follow from the seed."""
        rng, words = random.Random(seed), [*single_words()]
        random.Random(seed).shuffle(words)

        def listed(size: int, often: int, seldom: int) -> tuple[str, list[str]]:
            pool: Sequence[str] = words if size <= len(words) else compounds()
            drawn = rng.sample(pool, size)
            named = drawn[: self.common] * often + drawn[self.common :] * seldom
            random.Random(seed).shuffle(named)
            return numbered(named), drawn[: self.common]

        def make(size: int) -> Sample:
            shown, best = listed(*shape.worked)
            example = CONTEXT.format(context=shown) + QUESTION + PREFIX + " " + numbered(best)
            text, answers = listed(size, shape.often, shape.seldom)
            context = f"{example}\n{CONTEXT.format(context=text)}"
            return Sample(context, QUESTION, PREFIX, tuple(answers), NEW_TOKENS)

        return make


def numbered(words: Sequence[str]) -> str:
    """Number words: ``"1. word 2. word"``."""
    return " ".join(f"{place}. {word}" for place, word in enumerate(words, start=1))
