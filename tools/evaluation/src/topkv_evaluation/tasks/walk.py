"""Long generation: a walk from place to place, where only the prompt says the next place."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass

from topkv_evaluation.tasks.fitting import fitted, largest_size, total_of
from topkv_evaluation.tasks.sample import Count, Sample

CONTEXT = "Each of the following lines says which place comes after another one.\n{context}"
LINE = "After {place} comes {after}."
QUESTION = "\nBegin at {start} and go on for {steps} places. Write all of them in their order."
PREFIX = " The {steps} places that come after {start} are"
LETTERS, STEP, SLACK = 4, 5, 2


@dataclass(frozen=True)
class Walk:
    """A ring of places in an order of its own, one line for each, the lines in any order.

    Every step of the answer needs another line of the prompt, by the place that was written
    before: the lines that a long generation attends to cannot be known when it begins.

    Attributes:
        steps: places that are asked for.
    """

    steps: int = 32

    def __call__(self, count: Count, length: int, samples: int, seed: int) -> list[Sample]:
        """Make samples of at most ``length`` tokens with generated ones; see ``sample.Count``."""
        rng, least = random.Random(seed), self.steps + 1

        def make(size: int) -> Sample:
            return self._sample(size, rng, count)

        bound = int(3 * length / (count(make(least)) / least))
        size = largest_size(total_of(make, count), length, STEP, max(bound, least), least)
        return [fitted(make, count, length, size, STEP, least) for _ in range(samples)]

    def _sample(self, size: int, rng: random.Random, count: Count) -> Sample:
        ring = places(size, rng)
        lines = [
            LINE.format(place=place, after=after)
            for place, after in zip(ring, [*ring[1:], ring[0]], strict=True)
        ]
        rng.shuffle(lines)
        said = {"context": "\n".join(lines), "start": ring[0], "steps": self.steps}
        texts = (text.format(**said) for text in (CONTEXT, QUESTION, PREFIX))
        answers = tuple(ring[1 : self.steps + 1])
        asked = Sample(*texts, answers, 0)
        answered = Sample(asked.context, asked.question, f"{asked.prefix} {', '.join(answers)}",
                          answers, 0)  # fmt: skip
        new_tokens = count(answered) - count(asked) + SLACK
        return Sample(asked.context, asked.question, asked.prefix, answers, new_tokens)


def places(count: int, rng: random.Random) -> list[str]:
    """Draw names of four letters that all differ."""
    numbers = rng.sample(range(26**LETTERS), count)
    return ["".join(_letter(number // 26**i) for i in range(LETTERS)) for number in numbers]


def _letter(number: int) -> str:
    return string.ascii_lowercase[number % 26]
