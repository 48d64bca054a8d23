"""Tasks by the words of ``--tasks``: planted facts, plain text, RULER's, and files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from topkv.errors import ConfigError
from topkv_evaluation.eval.tasks import (
    Task,
    retrieval_task,
    sample_task,
    stops_of,
    text_task,
    texts_task,
)
from topkv_evaluation.loading import load_tokenizer
from topkv_evaluation.tasks import own, ruler
from topkv_evaluation.tasks.documents import read_documents
from topkv_evaluation.tasks.files import read_file
from topkv_evaluation.tasks.prompts import Prompts
from topkv_evaluation.tasks.splits import TUNING, seed_of
from topkv_evaluation.tasks.texts import KINDS

BYTES = 256
FACTS, TEXT, TEXTS, RULER = "facts", "text", "texts", "ruler"
KNOWN = (
    "facts, text, texts, texts:KIND, ruler, ruler:NAME, ruler:qa_1:FILE, ruler:qa_2:FILE, "
    f"{', '.join(own.OWN)}, or a file"
)


@dataclass(frozen=True)
class Catalogue:
    """Makes tasks for a model.

    Attributes:
        model: the model, not attached.
        folder: folder of its tokenizer, which is loaded only where a task needs it.
        lengths: tokens of contexts that are made; files bring their own.
        questions: most questions of each task and length.
        per_context: planted facts of a context.
        seed: seed of all draws, below ``splits.MOST``.
        split: split of the questions, which changes what the seed gives; files have none.
        depths: places of the asked needles in percent; None for where the task puts them.
        chat: True if a chat template is used where the tokenizer has one.
        scoring: replaces the scoring of a file's format; None keeps it.
        trust_remote_code: True if Python code of the tokenizer may run.
    """

    model: PreTrainedModel
    folder: Path
    lengths: Sequence[int]
    questions: int
    per_context: int = 25
    seed: int = 0
    split: str = TUNING
    depths: Sequence[int] | None = None
    chat: bool = True
    scoring: str | None = None
    trust_remote_code: bool = False

    @cached_property
    def prompts(self) -> Prompts:
        """Prompts of the model's tokenizer."""
        tokenizer = load_tokenizer(self.folder, trust_remote_code=self.trust_remote_code)
        return Prompts.of(tokenizer, self.chat)

    @cached_property
    def stop(self) -> frozenset[int]:
        """Token ids that end an answer."""
        return stops_of(self.prompts.tokenizer, self.model)

    def tasks(self, words: Sequence[str]) -> list[Task]:
        """Make the tasks in the order of the words, by length where they have one.

        Args:
            words: words from ``read_words``.

        Raises:
            ConfigError: a task cannot be made.
        """
        return [task for word in words for task in self._of(word)]

    def _of(self, word: str) -> list[Task]:
        if not has_length(word):
            samples, scoring = read_file(Path(word), self.questions)
            return [self._task(Path(word).name, samples, self.scoring or scoring)]
        if self.depths is None:
            made = [(length, None, self._made(word, length)) for length in self.lengths]
        else:
            made = [
                (length, depth, self._made(word, length, depth))
                for length in self.lengths
                for depth in self.depths
            ]
        about = {"family": word, "split": self.split}
        return [
            replace(task, about={**about, "length": length, "depth": depth})
            for length, depth, task in made
        ]

    def _made(self, word: str, length: int, depth: int | None = None) -> Task:
        """Make a task of a length."""
        if word == FACTS:
            self._check_bytes()
            seed = seed_of(self.split, self.seed)
            return retrieval_task(length, self.questions, self.per_context, seed)
        if word == TEXT:
            return text_task(length, self.questions, self.prompts, self.seed, self.split)
        if word.startswith(f"{TEXTS}:"):
            kind = word.removeprefix(f"{TEXTS}:")
            return texts_task(kind, length, self.questions, self.prompts, self.split)
        name, _, file = word.removeprefix(f"{RULER}:").partition(":")
        scoring = own.SCORINGS.get(word) or ruler.scoring_of(name)
        generator: ruler.Generator
        if depth is not None:
            generator = own.SWEPT[word].at(depth)
        else:
            generator = own.OWN.get(word) or (
                read_documents(name, Path(file)) if file else ruler.MADE[name]
            )
        seed = ruler.SEED + seed_of(self.split, self.seed)
        samples = generator(self.prompts.count, length, self.questions, seed)
        where = "" if depth is None else f", depth {depth}%"
        named = word.removesuffix(f":{file}") if file else word
        return self._task(f"{named}, {length} tokens{where}", samples, scoring)

    def _task(self, name: str, samples: Any, scoring: str) -> Task:
        return sample_task(name, samples, scoring, self.prompts, self.stop)

    def _check_bytes(self) -> None:
        if self.model.config.vocab_size != BYTES:
            raise ConfigError(
                "the model cannot be asked for planted facts",
                [
                    f"that task is made of bytes, {BYTES} tokens, and the model has "
                    f"{self.model.config.vocab_size}; name others with --tasks, such as ruler"
                ],
            )


SEVERAL = {
    RULER: [f"{RULER}:{name}" for name in ruler.MADE],
    TEXTS: [f"{TEXTS}:{kind}" for kind in KINDS],
}
"""Words that stand for several others."""


def _split(spec: str) -> list[str]:
    """Split an option into words; ``ruler`` is all eleven of its tasks that need no file,
    ``texts`` all kinds of texts."""
    words = [word for word in map(str.strip, spec.split(",")) if word]
    # A file may have a comma in its name.
    words = [spec] if Path(spec).is_file() else words
    return [each for word in words for each in SEVERAL.get(word, [word])]


def read_words(specs: Sequence[str]) -> list[str]:
    """Read ``"text,ruler:vt"`` as words, each of which names a task.

    Raises:
        ConfigError: with all words that name no task.
    """
    words = [word for spec in specs for word in _split(spec)]
    reasons = [reason for word in words if (reason := _wrong(word))]
    if reasons or not words:
        raise ConfigError("--tasks is refused", reasons or [f"expected {KNOWN}"])
    return words


def has_length(word: str) -> bool:
    """Return True if a task is made by length, not read from a file."""
    return word in (FACTS, TEXT, *own.OWN) or word.startswith((f"{RULER}:", f"{TEXTS}:"))


def _wrong(word: str) -> str | None:
    """Return why a word names no task; None if it names one."""
    family, _, rest = word.partition(":")
    if word in (FACTS, TEXT, *own.OWN, *SEVERAL[TEXTS], *SEVERAL[RULER]):
        return None
    if family == TEXTS:
        return f"{word!r}: no such kind of text; expected {', '.join(KINDS)}"
    if family == RULER:
        name, _, file = rest.partition(":")
        if name in ruler.READ:
            wanted = "SQuAD" if name == ruler.READ[0] else "HotpotQA"
            return None if file else f"{word!r}: name the file of {wanted} behind another colon"
        return f"{word!r}: RULER has no such task; it has {', '.join([*ruler.MADE, *ruler.READ])}"
    return None if Path(word).exists() else f"{word!r}: no such file; expected {KNOWN}"
