"""One question with all that it is asked with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """A prompt in three parts, and what should follow it.

    Attributes:
        context: what is read first, instructions included.
        question: what the user's turn ends with.
        prefix: how the answer begins; it is given, behind the template of a chat.
        answers: the right ones; how many of them are wanted is a matter of the scoring.
        new_tokens: tokens that are generated.
    """

    context: str
    question: str
    prefix: str
    answers: tuple[str, ...]
    new_tokens: int

    @property
    def prompt(self) -> str:
        """All of it, as a model without a chat template reads it."""
        return self.context + self.question + self.prefix


Count = Callable[[Sample], int]
"""Tokens of a prompt as the model is fed with it, without those that are generated."""
