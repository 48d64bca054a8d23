"""RULER's common words: a numbered list in which ten words stand far more often than others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from topkv_evaluation.tasks.fitting import fitted, largest_size, total_of
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
"""Below so many tokens lists are shorter and less lopsided."""


@dataclass(frozen=True)
class CommonWords:
    """Lists of ``common`` words, ``often`` times each, and others, ``seldom`` times each.

    Where RULER goes over to a list of English words that it keeps elsewhere, at more words than
    there are nouns, adjectives and verbs, compounds of an adjective and a noun are listed.
    """

    common: int = 10
    often: int = 30
    seldom: int = 3

    def __call__(self, count: Count, length: int, samples: int, seed: int) -> list[Sample]:
        """Samples of at most ``length`` tokens, generated ones included; see ``sample.Count``."""
        rng = random.Random(seed)
        words = [*single_words()]
        random.Random(seed).shuffle(words)
        short = length < SHORT
        repeats = (6, 1) if short else (self.often, self.seldom)
        worked = (20, 3, 1) if short else (40, 10, 3)

        def listed(size: int, often: int, seldom: int) -> tuple[str, list[str]]:
            pool: Sequence[str] = words if size <= len(words) else compounds()
            drawn = rng.sample(pool, size)
            named = drawn[: self.common] * often + drawn[self.common :] * seldom
            random.Random(seed).shuffle(named)
            return numbered(named), drawn[: self.common]

        def make(size: int) -> Sample:
            shown, best = listed(*worked)
            example = CONTEXT.format(context=shown) + QUESTION + PREFIX + " " + numbered(best)
            text, answers = listed(size, *repeats)
            context = f"{example}\n{CONTEXT.format(context=text)}"
            return Sample(context, QUESTION, PREFIX, tuple(answers), NEW_TOKENS)

        per_word = count(make(ESTIMATE)) / ESTIMATE
        bound = int(length // per_word) * 2
        size = largest_size(total_of(make, count), length, STEP, bound, self.common)
        return [fitted(make, count, length, size, STEP, self.common) for _ in range(samples)]


def numbered(words: Sequence[str]) -> str:
    """``"1. word 2. word"``."""
    return " ".join(f"{place}. {word}" for place, word in enumerate(words, start=1))
