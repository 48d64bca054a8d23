"""Scores of answers, from 0 to 1, by name."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

Score = Callable[[str, Sequence[str]], float]
"""Scores a generated text by the right answers."""

CONTROL = re.compile(r"[\x00-\x1f]")
ARTICLES = re.compile(r"\b(a|an|the)\b")


def _cleaned(text: str) -> str:
    """Clean a generated text as RULER does."""
    return CONTROL.sub("\n", text.strip()).strip().lower()


def string_match_all(text: str, answers: Sequence[str]) -> float:
    """Score as RULER: the share of the answers that occur, upper and lower case alike."""
    found = _cleaned(text)
    return sum(answer.lower() in found for answer in answers) / len(answers)


def string_match_part(text: str, answers: Sequence[str]) -> float:
    """Score as RULER's question answering: 1 if one of the answers occurs."""
    found = _cleaned(text)
    return float(any(answer.lower() in found for answer in answers))


def starts(text: str, answers: Sequence[str]) -> float:
    """Score 1 if the text begins with one of the answers, without space around it."""
    return float(text.strip().startswith(tuple(answer.strip() for answer in answers)))


def normalized(text: str) -> str:
    """Normalize as SQuAD: lower case, no punctuation or articles, single spaces."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(ARTICLES.sub(" ", kept).split())


def exact(text: str, answers: Sequence[str]) -> float:
    """Score as SQuAD's exact match: 1 if the text is one of the answers, both normalized."""
    return float(normalized(text) in map(normalized, answers))


def f1(text: str, answers: Sequence[str]) -> float:
    """Score as SQuAD and LongBench: F1 of normalized words, with the answer that fits best."""
    return max(_f1(normalized(text).split(), normalized(answer).split()) for answer in answers)


def _f1(words: list[str], wanted: list[str]) -> float:
    common = (Counter(words) & Counter(wanted)).total()
    return 2 * common / (len(words) + len(wanted)) if common else 0.0


def in_order(text: str, answers: Sequence[str]) -> float:
    """Score the share of answers that are written, in order, before the first wrong one."""
    found = text.replace(",", " ").split()
    right = 0
    for word, answer in zip(found, answers, strict=False):
        if word.rstrip(".") != answer:
            break
        right += 1
    return right / len(answers)


SCORINGS: dict[str, Score] = {
    "all": string_match_all,
    "contains": string_match_part,
    "starts": starts,
    "exact": exact,
    "f1": f1,
    "order": in_order,
}
"""Scores by name; ``all`` and ``contains`` are RULER's ``string_match_all`` and
``string_match_part``."""
