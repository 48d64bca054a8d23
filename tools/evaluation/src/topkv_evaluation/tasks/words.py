"""Material of the tasks: words, and a text to hide things in. All of it is package data.

The lists are those of wonderwords 3.0.1 (MIT; its license is beside them), from which RULER
takes its words. The haystack is prose of topkv's own documentation, a sentence a line.
"""

from __future__ import annotations

import lzma
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

DATA = Path(__file__).parent / "data"


@lru_cache
def _lines(name: str) -> tuple[str, ...]:
    text = lzma.decompress((DATA / f"{name}.txt.xz").read_bytes()).decode()
    return tuple(line.rstrip() for line in text.splitlines())


@lru_cache
def single_words() -> tuple[str, ...]:
    """Return all nouns, adjectives and verbs, sorted."""
    return tuple(sorted({*_lines("nouns"), *_lines("adjectives"), *_lines("verbs")}))


class Compounds(Sequence[str]):
    """Sequence of every ``adjective-noun``, sorted, without the six million strings.

    An adjective and those that go on from it with a hyphen (``old``, ``old-fashioned``) have their
    compounds between each other, so such ones are listed together.
    """

    def __init__(self) -> None:
        self.nouns = sorted({*_lines("nouns")})
        self.groups: list[list[str]] = []
        for adjective in sorted({*_lines("adjectives")}, key=lambda word: f"{word}-"):
            if self.groups and adjective.startswith(f"{self.groups[-1][0]}-"):
                self.groups[-1].append(adjective)
            else:
                self.groups.append([adjective])
        sizes = (len(self._members(i)) if len(group) > 1 else len(self.nouns)
                 for i, group in enumerate(self.groups))  # fmt: skip
        self.ends = list(accumulate(sizes))

    @lru_cache  # noqa: B019 - there is one, see ``compounds``
    def _members(self, group: int) -> list[str]:
        return sorted({f"{a}-{noun}" for a in self.groups[group] for noun in self.nouns})

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        group = bisect_right(self.ends, index)
        place = index - (self.ends[group - 1] if group else 0)
        if len(self.groups[group]) > 1:
            return self._members(group)[place]
        return f"{self.groups[group][0]}-{self.nouns[place]}"


@lru_cache
def compounds() -> Compounds:
    """Return the one sequence of compounds."""
    return Compounds()


@lru_cache
def _sentences() -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(line.split()) for line in _lines("haystack"))


def haystack(words: int, once: bool = False) -> list[str]:
    """Return the first ``words`` words of the haystack as sentences, the last one cut off.

    A haystack that is too short is begun again, unless it should be there only ``once``."""
    sentences: list[str] = []
    while words > 0:
        for sentence in _sentences():
            taken = sentence[:words]
            sentences.append(" ".join(taken))
            words -= len(taken)
            if not words:
                break
        if once:
            break
    return sentences
