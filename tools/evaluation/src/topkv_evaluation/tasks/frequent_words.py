"""RULER's frequent words: the three commonest of made-up words whose counts follow a zeta law."""

from __future__ import annotations

import math
import random
import string
from dataclasses import dataclass

import numpy as np

from topkv_evaluation.tasks.fitting import too_short
from topkv_evaluation.tasks.sample import Count, Sample

NEW_TOKENS = 50
CONTEXT = (
    "Read the following coded text and track the frequency of each coded word. Find the three "
    "most frequently appeared coded words. {context}"
)
QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text?"
)
PREFIX = (
    " Answer: According to the coded text above, the three most frequently appeared words are:"
)
NOISE = "..."
ZETA = math.pi**2 / 6
"""Value of zeta(2): the exponent of the law is 2."""
LETTERS, TOKENS_A_WORD, ASKED = 6, 50, 3


@dataclass(frozen=True)
class FrequentWords:
    """Words of six letters, one for every fifty tokens; the commonest of all is dots."""

    def __call__(self, count: Count, length: int, samples: int, seed: int) -> list[Sample]:
        """Make samples of at most ``length`` tokens with generated ones; see ``sample.Count``."""
        rng, room = random.Random(seed), length - NEW_TOKENS
        if room // TOKENS_A_WORD <= ASKED + 1:
            least = (ASKED + 2) * TOKENS_A_WORD + NEW_TOKENS
            raise too_short(length, f"fewer than {least} have too few words; ask for longer ones")
        step = max(1, room // 32)
        vocabulary = _vocabulary(room, rng, seed)
        words = room // LETTERS
        while count(_sample(vocabulary, words, seed)) < room:
            words += step
        words -= step
        return [self._fitted(count, room, words, step, rng, seed) for _ in range(samples)]

    def _fitted(
        self, count: Count, room: int, words: int, step: int, rng: random.Random, seed: int
    ) -> Sample:
        vocabulary = _vocabulary(room, rng, seed)
        while words > 0 and count(_sample(vocabulary, words, seed)) > room:
            words -= step
        counts = _counts(words, len(vocabulary)) if words > 0 else np.zeros(5)
        if not counts[ASKED] > counts[ASKED + 1]:
            raise too_short(room + NEW_TOKENS, "the third word is no commoner than the fourth")
        return _sample(vocabulary, words, seed)


def _vocabulary(room: int, rng: random.Random, seed: int) -> list[str]:
    size = room // TOKENS_A_WORD
    words = [_word(rng) for _ in range(size)]
    while len({*words}) < size:
        words.append(_word(rng))
    words = sorted({*words})
    random.Random(seed).shuffle(words)
    return [NOISE, *words[1:]]


def _word(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=LETTERS))


def _counts(words: int, vocabulary: int) -> np.ndarray:
    ranks = np.arange(1, vocabulary + 1)
    return (words * (ranks**-2.0) / ZETA).astype(int)


def _sample(vocabulary: list[str], words: int, seed: int) -> Sample:
    counts = _counts(words, len(vocabulary)).tolist()
    text = [word for word, times in zip(vocabulary, counts, strict=True) for _ in range(times)]
    random.Random(seed).shuffle(text)
    answers = tuple(vocabulary[1 : ASKED + 1])
    context = CONTEXT.format(context=" ".join(text))
    return Sample(context, QUESTION, PREFIX, answers, NEW_TOKENS)
