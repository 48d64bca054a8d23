"""Base of algorithms that select by an index that the model itself was trained with.

The model makes index queries, and one index key a token, and hands them down as queries and keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from topkv.hooks.algorithm import AlgorithmSetup
from topkv.plugins.discovery import hookimpl
from topkv.types import GroupShape, LayerView, ModelShape

PROMPT_ROWS = 512
"""Most prompt rows of a block, for which top-k has its scratch."""


class OwnIndex(ABC):
    """Keeps the index keys of tokens in pools of grain ``"token"``.

    Attributes:
        model, group: as in the setup.
        heads, dim: index heads, and elements of an index key.
        max_queries: most queries Q of a row.
        score_bytes: most bytes of what is kept of a block of prompt rows.
    """

    model: ModelShape
    group: GroupShape
    score_bytes: ClassVar[int]

    def __init__(self, setup: AlgorithmSetup) -> None:
        self.model, self.group = setup.model, setup.group
        self.max_queries = setup.max_queries
        indexer = self.model.indexer
        assert indexer is not None  # the entry needs one
        self.heads, self.dim = indexer.num_heads, indexer.head_dim

    @abstractmethod
    def write_index(self, layer: LayerView, slots: Tensor, tokens: Tensor, keys: Tensor) -> None:
        """Write index keys ``[n, D]`` of tokens of requests; the reference of ``construct`` and
        ``update``, in which shapes may depend on data."""

    @hookimpl
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        k = self.index_keys(k)
        tokens = start + torch.arange(k.shape[0], device=k.device)
        self.write_index(layer, torch.full_like(tokens, slot), tokens, k)

    @hookimpl
    def update(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        step, queries = layer.step, k.shape[1]
        keys = self.index_keys(k)
        nth = torch.arange(queries, device=k.device)
        tokens = (step.lengths - step.appended)[:, None] + nth
        new = (step.slots >= 0)[:, None] & (tokens >= 0) & (nth < step.appended[:, None])
        slots = step.slots[:, None].expand_as(tokens)
        self.write_index(layer, slots[new], tokens[new], keys[new.flatten()])

    def token_rows(self, layer: LayerView, slots: Tensor, tokens: Tensor) -> Tensor:
        """Rows of the pools, int64, of tokens of requests; both broadcast."""
        page = self.group.page_tokens
        return layer.step.page_table[slots, tokens // page].long() * page + tokens % page

    def prompt_blocks(
        self, start: int, rows: int, heads: int, device: torch.device
    ) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of prompt rows whose scores find room.

        Args:
            start: position of the first row.
            rows: rows of the prompt chunk.
            heads: scores that are kept of a row and token.
            device: of the second result.

        Yields:
            The rows, counted from ``start``, and how many units each of them sees, its own the
            last; int32 ``[m]``.
        """
        each, unit = 4 * (start + rows) * heads, self.group.unit
        most = max(1, min(self.score_bytes // max(each, 1), PROMPT_ROWS))
        for first in range(0, rows, most):
            at = slice(first, min(first + most, rows))
            seen = torch.arange(start + at.start + 1, start + at.stop + 1, device=device)
            yield at, (seen if unit == 1 else (seen + unit - 1) // unit).int()

    def index_keys(self, k: Tensor) -> Tensor:
        """Keys ``[n, D]`` of ``[..., 1, D]``."""
        self.check("k", k, (*k.shape[:-2], 1, self.dim))
        return k.flatten(0, -2)

    def step_rows(self, layer: LayerView, q: Tensor) -> tuple[int, int]:
        """Rows of a step, and queries of a row, as those of ``[B, Q, H, D]`` have to be."""
        return layer.step.batch, min(q.shape[1], self.max_queries)

    def index_queries(self, q: Tensor, rows: tuple[int, ...]) -> Tensor:
        """Queries ``[n, H, D]`` of ``[*rows, H, D]``, rows of a batch say and queries of a row."""
        self.check("q", q, (*rows, self.heads, self.dim))
        return q.flatten(0, -3)

    def check(self, name: str, x: Tensor | None, shape: tuple[int, ...]) -> None:
        """Raise ValueError for anything else than a tensor of this shape."""
        if x is None or tuple(x.shape) != shape:
            got = None if x is None else list(x.shape)
            raise ValueError(
                f"{type(self).__name__}: expected {name} of the index {list(shape)}, got {got}; "
                "the engine has to hand down what the model's own index projects"
            )
