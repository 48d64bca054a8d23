"""RULER's question answering: a question of SQuAD or HotpotQA, its documents among others.

Both data sets are files of the user's: ``dev-v2.0.json`` of SQuAD, and the distractor file of
HotpotQA's development set.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topkv.errors import ConfigError
from topkv_evaluation.tasks.fitting import Make, fitted, largest_size, total_of
from topkv_evaluation.tasks.sample import Count, Sample

NEW_TOKENS = 32
ORDER = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words."
)
CONTEXT = f"{ORDER}\n\nThe following are given documents.\n\n{{context}}"
QUESTION = f"\n\n{ORDER}\n\nQuestion: {{query}}"
PREFIX = " Answer:"
DOCUMENT = "Document {number}:\n{text}"
STEP = 10


@dataclass(frozen=True)
class Item:
    """A question, its answers, and numbers of documents that it needs and that are near it."""

    query: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class Documents:
    """The questions and documents of a data set.

    Attributes:
        items: in the order of the file.
        texts: the documents, sorted.
    """

    items: tuple[Item, ...]
    texts: tuple[str, ...]

    def __call__(self, count: Count, length: int, samples: int, seed: int) -> list[Sample]:
        """Make samples of at most ``length`` tokens, generated ones included, one a question of
        the file from its start; fewer than ``samples`` if it has no more."""
        rng = random.Random(seed)

        def of(item: Item) -> Make:
            return lambda size: self._sample(item, size, rng, seed)

        first = of(self.items[0])
        least = max(len(item.documents) for item in self.items[:samples])
        step = max(STEP, least)
        bound = int(length / (count(first(step)) / step) * 3)
        size = largest_size(total_of(first, count), length, step, bound, least)
        return [
            fitted(of(item), count, length, size, STEP, len(item.documents))
            for item in self.items[:samples]
        ]

    def _sample(self, item: Item, size: int, rng: random.Random, seed: int) -> Sample:
        needed, near = [*item.documents], [*item.near]
        if size >= len(self.texts):
            # As RULER: all documents, again from the start where they are too few.
            chosen = [i % len(self.texts) for i in range(size)]
        elif size - len(needed) > len(near):
            beside = {*needed, *near}
            others = [i for i in range(len(self.texts)) if i not in beside]
            chosen = needed + near + rng.sample(others, size - len(needed) - len(near))
        else:
            chosen = needed + rng.sample(near, size - len(needed))
        texts = [self.texts[i] for i in chosen]
        random.Random(seed).shuffle(texts)
        shown = [DOCUMENT.format(number=i, text=text) for i, text in enumerate(texts, start=1)]
        context = CONTEXT.format(context="\n\n".join(shown))
        return Sample(context, QUESTION.format(query=item.query), PREFIX, item.answers, NEW_TOKENS)


def _numbered(texts: list[str]) -> tuple[tuple[str, ...], dict[str, int]]:
    ordered = tuple(sorted({*texts}))
    return ordered, {text: number for number, text in enumerate(ordered)}


def _of_squad(data: Mapping[str, Any]) -> Documents:
    texts, number = _numbered([p["context"] for d in data["data"] for p in d["paragraphs"]])
    items = []
    for article in data["data"]:
        beside = [number[p["context"]] for p in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            own = number[paragraph["context"]]
            near = tuple(other for other in beside if other != own)
            for asked in paragraph["qas"]:
                if not asked.get("is_impossible", False):
                    answers = tuple(answer["text"] for answer in asked["answers"])
                    items.append(Item(asked["question"], answers, (own,), near))
    return Documents(tuple(items), texts)


def _of_hotpotqa(data: list[Any]) -> Documents:
    def text(title: str, sentences: list[str]) -> str:
        return f"{title}\n{''.join(sentences)}"

    texts, number = _numbered([text(*each) for item in data for each in item["context"]])
    items = [
        Item(d["question"], (d["answer"],), tuple(number[text(*each)] for each in d["context"]))
        for d in data
    ]
    return Documents(tuple(items), texts)


Read = Callable[[Any], Documents]

FILES: Mapping[str, tuple[Read, str]] = {
    "qa_1": (_of_squad, "SQuAD's dev-v2.0.json"),
    "qa_2": (_of_hotpotqa, "HotpotQA's hotpot_dev_distractor_v1.json"),
}
"""Reader and file of each task."""


def read_documents(name: str, path: Path) -> Documents:
    """Read the data set of RULER's ``qa_1`` or ``qa_2``.

    Raises:
        ConfigError: the file cannot be read, or is not of that data set.
    """
    of, wanted = FILES[name]
    what = f"the data set {path} of {name} is refused"
    try:
        found = of(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(what, [f"expected {wanted}; it cannot be read: {error}"]) from error
    except (KeyError, TypeError, AttributeError) as error:
        reason = f"expected {wanted}, got other fields: {type(error).__name__} {error}"
        raise ConfigError(what, [reason]) from error
    if not found.items:
        raise ConfigError(what, [f"expected {wanted}, got no question that has an answer"])
    return found
