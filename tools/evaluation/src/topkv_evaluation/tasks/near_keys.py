"""Needles among keys that are nearly theirs: a selector has to see a difference of one letter."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from topkv_evaluation.tasks.fitting import fitted, largest_size, total_of
from topkv_evaluation.tasks.needles import (
    CONTEXT,
    NEEDLE,
    NEW_TOKENS,
    PREFIX,
    QUESTION,
    in_singular,
    place_of,
)
from topkv_evaluation.tasks.sample import Count, Sample

if TYPE_CHECKING:
    from collections.abc import Iterator

LETTERS, KIND, STEP = 8, "numbers", 5


@dataclass(frozen=True)
class NearKeys:
    """RULER's needles under keys of eight letters, all others one letter from the one asked for.

    Once there are more needles than such keys (200), further ones differ in two. Every number
    stands in the prompt once.

    Attributes:
        depth: place of the asked needle, in percent of the needles; None for anywhere.
    """

    depth: int | None = None

    def at(self, depth: int) -> NearKeys:
        """Return the task with the asked needle at a depth."""
        return replace(self, depth=depth)

    def __call__(self, count: Count, length: int, samples: int, seed: int) -> list[Sample]:
        """Make samples of at most ``length`` tokens with generated ones; see ``sample.Count``."""
        rng = random.Random(seed)

        def make(size: int) -> Sample:
            return self._sample(size, rng)

        bound = int(3 * length / (count(make(STEP)) / STEP))
        size = largest_size(total_of(make, count), length, STEP, bound, 2)
        return [fitted(make, count, length, size, STEP, 2) for _ in range(samples)]

    def _sample(self, size: int, rng: random.Random) -> Sample:
        asked = "".join(rng.choices(string.ascii_lowercase, k=LETTERS))
        keys = [asked, *near(asked, size - 1, rng)]
        values = rng.sample(range(10**6, 10**7), size)
        needles = [
            NEEDLE.format(kind=KIND, key=key, value=value)
            for key, value in zip(keys, values, strict=True)
        ]
        first, others = needles[0], needles[1:]
        rng.shuffle(others)
        place = rng.randint(0, len(others)) if self.depth is None else place_of(self.depth, others)
        context = "\n".join([*others[:place], first, *others[place:]])
        texts = in_singular((CONTEXT, QUESTION, PREFIX))
        said = {"kind": KIND.removesuffix("s"), "context": context, "query": asked}
        before, question, prefix = (text.format(**said) for text in texts)
        return Sample(before, question, prefix, (str(values[0]),), NEW_TOKENS)


def near(key: str, count: int, rng: random.Random) -> list[str]:
    """Draw ``count`` distinct keys that differ from ``key`` in as few letters as possible."""
    found: dict[str, None] = {}
    seeds = [key]
    while len(found) < count:
        ring = [each for seed in seeds for each in _neighbours(seed) if each != key]
        ring = [each for each in dict.fromkeys(ring) if each not in found]
        found |= dict.fromkeys(rng.sample(ring, min(count - len(found), len(ring))))
        seeds = ring
    return [*found]


def _neighbours(key: str) -> Iterator[str]:
    for place, was in enumerate(key):
        for letter in string.ascii_lowercase:
            if letter != was:
                yield key[:place] + letter + key[place + 1 :]
