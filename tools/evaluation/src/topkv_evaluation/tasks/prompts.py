"""Tokens of samples, with the chat template of a tokenizer that has one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from topkv.errors import ConfigError
from topkv_evaluation.tasks.sample import Sample


@dataclass(frozen=True)
class Prompts:
    """Writes samples for a model.

    Context and question are turned into tokens apart, so that the context can be read once for
    many questions; special tokens go before contexts alone.

    Attributes:
        tokenizer: tokenizer of Transformers.
        chat: True if prompts are a turn of its chat template.
    """

    tokenizer: Any
    chat: bool

    @classmethod
    def of(cls, tokenizer: Any, chat: bool = True) -> Prompts:
        """Make prompts with the chat template, if the tokenizer has one and ``chat`` allows it."""
        return cls(tokenizer, chat and getattr(tokenizer, "chat_template", None) is not None)

    def texts(self, sample: Sample) -> tuple[str, str]:
        """Return the text before the question, and the question with all behind it.

        Raises:
            ConfigError: the chat template changes the question beyond recognition.
        """
        if not self.chat:
            return sample.context, sample.question + sample.prefix
        turn = [{"role": "user", "content": sample.context + sample.question}]
        written = self.tokenizer.apply_chat_template(
            turn, tokenize=False, add_generation_prompt=True
        )
        place = written.rfind(sample.question.strip())
        if place <= 0:
            raise ConfigError(
                "the chat template of the tokenizer cannot be used",
                ["it does not show the user's turn as it is; pass --no-chat-template"],
            )
        return written[:place], written[place:] + sample.prefix

    def tokens(self, sample: Sample) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return token ids of the context, and of the question with all behind it."""
        context, question = self.texts(sample)
        first = self.tokenizer(context, add_special_tokens=not self.chat)["input_ids"]
        return tuple(first), self.encode(question)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return token ids of a text that continues another; no special tokens."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def count(self, sample: Sample) -> int:
        """Count the tokens of the whole prompt; see ``sample.Count``."""
        return sum(map(len, self.tokens(sample)))
