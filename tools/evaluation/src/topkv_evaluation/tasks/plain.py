"""Tasks that a small model answers: look-ups in a list, and sentences to be said again."""

from __future__ import annotations

import random
from dataclasses import dataclass

from topkv_evaluation.tasks.fitting import fitted, largest_size, total_of
from topkv_evaluation.tasks.sample import Count, Sample
from topkv_evaluation.tasks.words import haystack, single_words

STEP, SLACK = 5, 2
LIST = "Here is a list of names and their numbers.\n{context}\n"
LOOKUP = "\nWhat is the number of {name}?"
NUMBER = " {name}:"
TEXT = "Read the following text.\n{context}\n"
AGAIN = '\nSay again, word by word, the sentence of the text that begins with "{begin}".'


@dataclass(frozen=True)
class Lookup:
    """A list of names with numbers of four digits, one of which is asked for."""

    def __call__(self, count: Count, length: int, samples: int, seed: int) -> list[Sample]:
        """Make samples of at most ``length`` tokens with generated ones; see ``sample.Count``."""
        rng = random.Random(seed)

        def make(size: int) -> Sample:
            names = [word.capitalize() for word in rng.sample(single_words(), size)]
            values = [str(value) for value in rng.sample(range(1000, 10000), size)]
            place = rng.randrange(size)
            lines = [f"{name}: {value}" for name, value in zip(names, values, strict=True)]
            name = names[place]
            before, question = LIST.format(context="\n".join(lines)), LOOKUP.format(name=name)
            return Sample(before, question, NUMBER.format(name=name), (values[place],), 8)

        bound = int(3 * length / (count(make(STEP)) / STEP))
        most = min(bound, len(single_words()) // 2)
        size = largest_size(total_of(make, count), length, STEP, most, 2)
        return [fitted(make, count, length, size, STEP, 2) for _ in range(samples)]


@dataclass(frozen=True)
class Copy:
    """A text, of which a sentence is to be said again.

    Attributes:
        begin: number of given words at the beginning of the sentence.
        words: number of words behind them that are scored, in order.
    """

    begin: int = 5
    words: int = 8

    def __call__(self, count: Count, length: int, samples: int, seed: int) -> list[Sample]:
        """Make samples of at most ``length`` tokens with generated ones; see ``sample.Count``."""
        rng, every = random.Random(seed), haystack(1 << 30, once=True)

        def make(size: int) -> Sample:
            start = rng.randrange(len(every) - size)
            reported = every[start : start + size]
            fit = [
                each.split() for each in reported if len(each.split()) >= self.begin + self.words
            ]
            asked = rng.choice(fit) if fit else reported[0].split()
            begin, rest = asked[: self.begin], asked[self.begin :][: self.words]
            answers = tuple(word.replace(",", "").rstrip(".") for word in rest)
            prefix = f" {' '.join(begin)}"
            text = TEXT.format(context="\n".join(reported))
            question = AGAIN.format(begin=" ".join(begin))
            return Sample(text, question, prefix, answers, 4 * self.words)

        bound = min(int(3 * length / (count(make(STEP)) / STEP)), len(every) // 2)
        size = largest_size(total_of(make, count), length, STEP, bound, STEP)
        return [fitted(make, count, length, size, STEP, STEP) for _ in range(samples)]
