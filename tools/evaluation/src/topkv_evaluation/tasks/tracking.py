"""RULER's variable tracking: variables that hold a value, by a chain of assignments in noise."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from topkv_evaluation.tasks.fitting import fitted, largest_size, total_of
from topkv_evaluation.tasks.needles import NOISE
from topkv_evaluation.tasks.sample import Count, Sample

NEW_TOKENS = 30
CONTEXT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text."
    "\n\n{context}"
)
QUESTION = "\nQuestion: Find all variables that are assigned the value {query} in the text above."
PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} "
    "variables are assigned the value {query}, they are: "
)
EXAMPLE_VALUE = "12345"
EXAMPLE_TOKENS, EXAMPLE_STEP = 500, 5
"""Most tokens of the worked example before each question, and the step of its search."""


@dataclass(frozen=True)
class Chain:
    """One chain of ``hops`` assignments that go back to a value."""

    hops: int = 4

    def __call__(self, count: Count, length: int, samples: int, seed: int) -> list[Sample]:
        """Make samples of at most ``length`` tokens with generated ones; see ``sample.Count``."""
        rng, numbers = random.Random(seed), np.random.RandomState(seed)
        example = self._example(count, rng)
        shown = f"{example.prompt} {' '.join(example.answers)}\n"

        def plain(size: int) -> Sample:
            return self._sample(size, rng, str(numbers.randint(10000, 99999)), 5)

        def make(size: int) -> Sample:
            sample = plain(size)
            first = self._renamed(shown, rng, numbers) + "\n"
            rest = (sample.question, sample.prefix, sample.answers, sample.new_tokens)
            return Sample(first + sample.context, *rest)

        around = count(Sample(shown, "", "", (), 0)) + NEW_TOKENS
        step, least = 10 if length >= 4096 else 5, self.hops + 1
        bound = int(length / (count(plain(step)) / step) * 3)
        size = largest_size(lambda size: count(plain(size)) + around, length, step, bound, least)
        return [fitted(make, count, length, size, step, least) for _ in range(samples)]

    def _example(self, count: Count, rng: random.Random) -> Sample:
        """Make a short worked example with its answer; nothing is generated for it."""

        def make(size: int) -> Sample:
            return replace(self._sample(size, rng, EXAMPLE_VALUE, 3), new_tokens=0)

        step, least, most = EXAMPLE_STEP, self.hops + 1, EXAMPLE_TOKENS
        first = count(make(step))
        if first > most:  # a tokenizer of bytes, say: the shortest that there is
            most = 2 * first
            return fitted(make, count, most, least, step, least)
        bound = int(most / (first / step) * 3)
        size = largest_size(total_of(make, count), most, step, bound, least)
        return fitted(make, count, most, size, step, least)

    def _renamed(self, shown: str, rng: random.Random, numbers: np.random.RandomState) -> str:
        """Rename the example's variables and value, so that nothing can be copied."""
        for name in shown.strip().split()[-self.hops - 1 :]:
            shown = shown.replace(name, _name(rng, len(name)))
        return shown.replace(EXAMPLE_VALUE, str(numbers.randint(10000, 99999)))

    def _sample(self, size: int, rng: random.Random, value: str, letters: int) -> Sample:
        names = [_name(rng, letters) for _ in range(self.hops + 1)]
        while len({*names}) <= self.hops:
            names.append(_name(rng, letters))
        names = names[: self.hops + 1]
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {new} = VAR {old} " for old, new in pairwise(names)]
        lines = [NOISE] * size
        for gone, place in enumerate(sorted(rng.sample(range(size), len(chain)))):
            lines.insert(place + gone, chain[gone])
        context = "\n".join(lines).replace(". \n", ".\n")
        said = {"context": context, "query": value, "count": self.hops + 1}
        before, question, prefix = (text.format(**said) for text in (CONTEXT, QUESTION, PREFIX))
        return Sample(before, question, prefix, tuple(names), NEW_TOKENS)


def _name(rng: random.Random, letters: int) -> str:
    return "".join(rng.choices(string.ascii_uppercase, k=letters))
