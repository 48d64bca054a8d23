"""Batches of text with planted facts and questions, made on the device without a host sync."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from topkv_evaluation.retrieval import (
    ASK,
    FACT,
    FACT_BYTES,
    KEY_LETTERS,
    KEY_OFFSET,
    VALUE_DIGITS,
    VALUE_OFFSET,
)

BYTES_PER_PAIR = 160
_KEYS = 26**KEY_LETTERS


@dataclass(frozen=True)
class Batch:
    """One batch.

    Attributes:
        tokens: [B, n] int64.
        answers: [B, pairs, 5] int64, positions of the digits of every answer.
        plain: [B, n] bool, True where the text is as it was, False in planted statements.
    """

    tokens: Tensor
    answers: Tensor
    plain: Tensor


def _template(pattern: str) -> list[int]:
    return list(pattern.format(key="k" * KEY_LETTERS, value="0" * VALUE_DIGITS).encode())


class BatchMaker:
    """Draws text windows and plants pairs of a fact and, later, its question with its answer.

    Args:
        text: [n] uint8, the text to draw from.
        device: where batches are made.
        seed: seed of all draws.
    """

    def __init__(self, text: np.ndarray, device: torch.device, seed: int) -> None:
        self._text = torch.from_numpy(text.copy()).to(device)
        self._device = device
        self._rng = torch.Generator(device=device).manual_seed(seed)
        self._fact = torch.tensor(_template(FACT), device=device)
        self._ask = torch.tensor(_template(ASK + "{value}.\n"), device=device)
        # Consecutive multiples of a step without a common divisor with 26**4 never repeat a key;
        # the permutation hides that they are multiples.
        self._keys = torch.randperm(_KEYS, generator=self._rng, device=device)

    def __call__(self, rows: int, length: int, pairs: int | None = None) -> Batch:
        """Draw ``rows`` documents of ``length`` tokens; about one pair in 160 tokens by default.

        Raises:
            ValueError: the statements do not fit, or the text is shorter than ``length``.
        """
        pairs = max(1, length // BYTES_PER_PAIR) if pairs is None else pairs
        if length < 2 * pairs * FACT_BYTES or length > len(self._text):
            raise ValueError(
                f"length {length} must be at least {2 * pairs * FACT_BYTES} for {pairs} pairs and"
                f" at most {len(self._text)}, the length of the text"
            )
        start = self._integers(0, len(self._text) - length + 1, rows, 1)
        window = start + torch.arange(length, device=self._device)
        tokens = self._text[window].long()
        plain = torch.ones_like(tokens, dtype=torch.bool)
        facts_at, asks_at = self._places(rows, length, pairs)
        keys, values = self._random_keys(rows, pairs), self._random_values(rows, pairs)
        for kind, at, template in (("fact", facts_at, self._fact), ("ask", asks_at, self._ask)):
            statement = template.repeat(rows, pairs, 1)
            key, value = KEY_OFFSET[kind], VALUE_OFFSET[kind]
            statement[..., key : key + KEY_LETTERS] = keys
            statement[..., value : value + VALUE_DIGITS] = values
            where = at[..., None] + torch.arange(len(template), device=self._device)
            tokens.scatter_(1, where.flatten(1), statement.flatten(1))
            plain.scatter_(1, where.flatten(1), False)
        first = asks_at + VALUE_OFFSET["ask"]
        answers = first[..., None] + torch.arange(VALUE_DIGITS, device=self._device)
        return Batch(tokens, answers, plain)

    def _integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self._rng, device=self._device)

    def _places(self, rows: int, length: int, pairs: int) -> tuple[Tensor, Tensor]:
        """Draw starts [B, pairs] of facts and of their questions: no two statements overlap."""
        count = 2 * pairs
        slack = self._integers(0, length - count * FACT_BYTES + 1, rows, count).sort(dim=1).values
        starts = slack + torch.arange(count, device=self._device) * FACT_BYTES
        order = torch.rand(rows, count, generator=self._rng, device=self._device).argsort(dim=1)
        couples = order.view(rows, pairs, 2).sort(dim=2).values
        places = starts.gather(1, couples.flatten(1)).view(rows, pairs, 2)
        return places[..., 0], places[..., 1]

    def _random_keys(self, rows: int, pairs: int) -> Tensor:
        """Draw letters [B, pairs, 4] of keys that all differ within a row."""
        step = 2 * self._integers(0, _KEYS // 2, rows, 1) + 1
        step = torch.where(step % 13 == 0, step + 2, step)
        index = self._integers(0, _KEYS, rows, 1) + step * torch.arange(pairs, device=self._device)
        number = self._keys[index % _KEYS]
        powers = 26 ** torch.arange(KEY_LETTERS, device=self._device)
        return number[..., None] // powers % 26 + ord("a")

    def _random_values(self, rows: int, pairs: int) -> Tensor:
        """Draw digits [B, pairs, 5], the first not 0."""
        digits = self._integers(0, 10, rows, pairs, VALUE_DIGITS)
        digits[..., 0] = self._integers(1, 10, rows, pairs)
        return digits + ord("0")
