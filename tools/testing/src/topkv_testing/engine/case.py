"""The part of the engine suite that the author of an engine writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from topkv_testing.engine.state import state_of


class EngineCase(ABC):
    """Model and generation of an engine, written by its author.

    Attributes:
        tokens: token ids that prompts may hold; neither padding nor an end is among them.
        chunked: ``generate`` can take a prompt in several forwards.
    """

    tokens: range
    chunked: bool = False

    @abstractmethod
    def make_model(self, seed: int, device: torch.device) -> Any:
        """A tiny random model of 2 layers or more and 128 positions or more, made anew.

        The same seed gives the same weights. Make them large, so that attention is sharp: the
        suite refuses a model whose logits under a selection are near those of dense attention.
        """

    @abstractmethod
    def generate(
        self, model: Any, prompts: list[list[int]], steps: int, chunk: int | None = None
    ) -> tuple[list[list[int]], Tensor]:
        """Generate exactly ``steps`` greedy tokens for each prompt, attached or not, in one batch.

        Args:
            prompts: of different lengths; pad them as the engine wants it.
            chunk: at most this many tokens of a prompt in one forward; only if ``chunked``.

        Returns:
            The new tokens, and float64 ``[B, steps, V]`` logits that they were chosen from.
            Nothing of the call holds a request when it has returned or raised.
        """

    @abstractmethod
    def dense_logits(
        self,
        model: Any,
        prompt: list[int],
        new_tokens: list[int],
        dtype: torch.dtype,
        allowed: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Compute logits of ``new_tokens`` by one plain forward of a model that is not attached.

        Args:
            model: it stays as it is; compute in a copy.
            dtype: that weights and activations are converted to.
            allowed: of each layer bool ``[Hkv, T, T]`` with ``T = len(prompt + new_tokens) - 1``:
                the columns that a query may attend; causal attention if None.

        Returns:
            float64 ``[len(new_tokens), V]``.
        """

    @abstractmethod
    def coordinator(self, handle: Any) -> Any:
        """The ``SparseCoordinator`` behind what ``attach`` returned."""

    def settings(self, **changes: Any) -> dict[str, Any]:
        """The ``SparseConfig`` as a dict: what the suite asks for, and what the engine needs."""
        return changes

    def state(self, model: Any) -> dict[str, Any]:
        """Everything that ``attach`` must not change for good: by default all attributes."""
        return state_of(model)
