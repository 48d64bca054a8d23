"""Samples: a question with its whole prompt and its answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """A prompt in three parts, and its right answers.

    Attributes:
        context: text that is read first, instructions included.
        question: end of the user's turn.
        prefix: given beginning of the answer, behind the template of a chat.
        answers: right answers; the scoring says how many of them are wanted.
        new_tokens: tokens that are generated.
    """

    context: str
    question: str
    prefix: str
    answers: tuple[str, ...]
    new_tokens: int

    @property
    def prompt(self) -> str:
        """The whole prompt, as a model without a chat template reads it."""
        return self.context + self.question + self.prefix


Count = Callable[[Sample], int]
"""Returns the tokens of a prompt as the model reads it, without generated ones."""
