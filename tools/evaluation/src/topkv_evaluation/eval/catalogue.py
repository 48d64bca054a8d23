"""Tasks by the words of ``--tasks``: planted facts, plain text, RULER's, and files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from topkv.errors import ConfigError
from topkv_evaluation.eval.options import Options
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
from topkv_evaluation.tasks.splits import seed_of
from topkv_evaluation.tasks.texts import KINDS

BYTES = 256
CONTEXT = 4096
FACTS, TEXT, TEXTS, RULER = "facts", "text", "texts", "ruler"
KNOWN = (
    "facts, text, texts, texts:KIND, ruler, ruler:NAME, ruler:qa_1:FILE, ruler:qa_2:FILE, "
    f"{', '.join(own.OWN)}, or a file"
)


@dataclass(frozen=True)
class Catalogue:
    """Makes tasks for a model, which is not attached, by the options of the command."""

    model: PreTrainedModel
    options: Options

    @cached_property
    def prompts(self) -> Prompts:
        """Prompts of the model's tokenizer."""
        trust = self.options.trust_remote_code
        tokenizer = load_tokenizer(self.options.folder, trust_remote_code=trust)
        return Prompts.of(tokenizer, self.options.chat_template)

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
        options = self.options
        if not has_length(word):
            samples, scoring = read_file(Path(word), options.questions)
            return [self._task(Path(word).name, samples, options.scoring or scoring)]
        about = {"family": word, "split": options.split}
        return [
            replace(
                self._made(word, length, depth), about={**about, "length": length, "depth": depth}
            )
            for length in options.contexts or usual_contexts(self.model)
            for depth in ((None,) if options.depths is None else options.depths)
        ]

    def _made(self, word: str, length: int, depth: int | None = None) -> Task:
        """Make a task of a length."""
        questions, split = self.options.questions, self.options.split
        seed = seed_of(split, self.options.seed)
        if word == FACTS:
            self._check_bytes()
            return retrieval_task(length, questions, self.options.per_context, seed)
        if word == TEXT:
            return text_task(length, questions, self.prompts, self.options.seed, split)
        if word.startswith(f"{TEXTS}:"):
            kind = word.removeprefix(f"{TEXTS}:")
            return texts_task(kind, length, questions, self.prompts, split)
        name, _, file = word.removeprefix(f"{RULER}:").partition(":")
        scoring = own.SCORINGS.get(word) or ruler.scoring_of(name)
        generator: ruler.Generator
        if depth is not None:
            generator = own.SWEPT[word].at(depth)
        else:
            generator = own.OWN.get(word) or (
                read_documents(name, Path(file)) if file else ruler.MADE[name]
            )
        samples = generator(self.prompts.count, length, questions, ruler.SEED + seed)
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


def usual_contexts(model: PreTrainedModel) -> list[int]:
    """Return ``CONTEXT`` if the model has positions for it, with questions and answers; else the
    largest power of two that leaves it as many again."""
    positions = getattr(model.config, "max_position_embeddings", None) or 2 * CONTEXT
    fits = positions >= CONTEXT + CONTEXT // 8
    return [CONTEXT if fits else 1 << (positions // 2).bit_length() - 1]


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
