"""One forward of a model over a ``TopkvCache``: which rows it appends, and their attention.

Transformers computes with padded batches ``[B, H, q, D]``; the core takes rows ``[rows, H, D]`` of
real tokens. Padding is read from the mask when a prompt is appended and never again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from attrs import define
from torch import Tensor

from topkv import SparseCoordinator
from topkv.errors import CapabilityError, RequestError
from topkv.types import Index
from topkv_transformers.state import CacheState
from topkv_transformers.watch import ModelState


@define(eq=False)
class Forward:
    """An open forward.

    Attributes:
        coordinator: where the rows live.
        state: the cache that it appends to.
        columns: q, new columns of the padded batch.
        chunks: of a prefill forward, ``(slot, tokens)`` of the rows with real tokens; None for
            decode, where each row appends all columns.
        index: int64 rows of the flattened ``[B * q]`` batch that hold real tokens; None
            where all do.
        seen: columns of the cache before the forward.
        lengths: tokens of each row before the forward.
        offloaded: the step has run ``offload`` itself.
        kept: what the stock layers held before the forward; None until that is known.
        model: the state of the model; None until that is known.
    """

    coordinator: SparseCoordinator
    state: CacheState
    columns: int
    chunks: list[tuple[int, int]] | None
    index: Tensor | None
    seen: int
    lengths: list[int]
    offloaded: bool = False
    kept: list[dict[str, Any]] | None = None
    model: ModelState | None = None

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: Index | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend one layer, in rows; see ``SparseCoordinator.attention``.

        Raises:
            CapabilityError: the keys are of another dtype than those of the model.
        """
        if k.dtype is not self.coordinator.model.dtype:
            raise CapabilityError(
                "this forward cannot run through topkv",
                [
                    f"keys are {k.dtype}, expected {self.coordinator.model.dtype} as the model "
                    "had when it was attached; attach again after a change"
                ],
            )
        return self.coordinator.attention(layer, q, k, v, index, sinks=sinks)

    def pack(self, columns: Tensor) -> Tensor:
        """The real tokens of ``[B, q, ...]`` as ``[rows, ...]``, contiguous."""
        rows = columns.flatten(0, 1)
        return rows.contiguous() if self.index is None else rows.index_select(0, self.index)

    def unpack(self, rows: Tensor, batch: int) -> Tensor:
        """``[rows, ...]`` as ``[B, q, ...]``; padding gets 0."""
        if self.index is not None:
            padded = rows.new_zeros((batch * self.columns, *rows.shape[1:]))
            rows = padded.index_copy_(0, self.index, rows)
        return rows.unflatten(0, (batch, self.columns))


FIRST = "set the tokenizer's padding_side to 'left'"
"""Advice in errors on how a prompt gets its padding; ``LATER`` is that for a further turn."""

LATER = (
    "a cache keeps each column that it was given, so also the padding behind a row that ended "
    "before others. Pad all conversations anew on the left and pass their ids without "
    "past_key_values, or give each conversation a cache of its own"
)


def left_padding(mask: Tensor, seen: int = 0) -> np.ndarray:
    """Padding columns of each row, int64 ``[B]``; a row may hold nothing else.

    Args:
        mask: ``[B, n]``, 0 where a column is padding.
        seen: columns that the cache holds.

    Raises:
        CapabilityError: a mask of another form, right padding or holes.
    """
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        form = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise CapabilityError(
            "this attention mask cannot run through topkv",
            [f"expected a 2D mask of padding, got {form}; pass the tokenizer's attention_mask"],
        )
    real = mask.detach().cpu().numpy() != 0
    falls = real[:, :-1] & ~real[:, 1:]
    if falls.any():
        rows = np.flatnonzero(falls.any(1)).tolist()
        raise CapabilityError(
            "this attention mask cannot run through topkv",
            [
                f"rows {rows} have right padding or holes; expected left padding alone: "
                f"{LATER if seen else FIRST}"
            ],
        )
    return (~real).sum(1).astype(np.int64)


def is_prefill(state: CacheState, columns: int) -> bool:
    """Return True if a forward of ``columns`` columns still belongs to the prompt."""
    return (
        columns > state.most
        or state.seen == 0
        or state.seen < state.prompt
        or bool((state.padding >= state.seen).any())
    )


def open_forward(
    coordinator: SparseCoordinator, state: CacheState, columns: int, mask: Tensor | None
) -> Forward:
    """Decide what a forward appends, and begin it in the coordinator.

    Raises:
        CapabilityError: the mask asks for more than left padding.
        RequestError: the mask contradicts what the cache holds.
        HostMemoryError: pages are missing.
    """
    _check_mask(state, columns, mask)
    chunks: list[tuple[int, int]] | None = None
    index = None
    padding = state.padding
    if is_prefill(state, columns):
        if mask is not None:
            padding = _grown(state, columns, left_padding(mask, state.seen))
        pads = np.clip(padding - state.seen, 0, columns)
        chunks = [
            (slot, columns - pad)
            for slot, pad in zip(state.slots, pads.tolist(), strict=True)
            if pad < columns
        ]
        if pads.any():
            real = np.arange(columns) >= pads[:, None]
            index = torch.from_numpy(np.flatnonzero(real)).to(coordinator.config.device)
    if chunks is None:
        coordinator.forward_begin(decode=state.slots, queries=columns)
    else:
        coordinator.forward_begin(prefill=chunks)
    lengths = coordinator.requests.length[state.slots].tolist()  # behind pages that were dropped
    state.padding = padding
    return Forward(coordinator, state, columns, chunks, index, state.seen, lengths)


def _check_mask(state: CacheState, columns: int, mask: Tensor | None) -> None:
    """Check a mask by shapes alone, without a word from the device."""
    if mask is None:
        if state.seen and state.padding.any():
            raise RequestError(
                "the cache holds left-padded rows and attention_mask is missing; pass the mask "
                f"of all {state.seen + columns} columns"
            )
        return
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        left_padding(mask)
    expected = (len(state.slots), state.seen + columns)
    if tuple(mask.shape) != expected:
        raise RequestError(
            f"attention_mask: expected shape {list(expected)} for {state.seen} columns in the "
            f"cache and {columns} new ones, got {list(mask.shape)}; to append a turn pass the "
            "mask of the whole sequence"
        )


def _grown(state: CacheState, columns: int, padding: np.ndarray) -> np.ndarray:
    """Padding after a forward, checked against what was known before."""
    end, known = state.seen + columns, state.padding
    expected = np.minimum(known, end)
    still_empty = (known >= state.seen) & (padding > known)
    if not ((padding == expected) | still_empty).all():
        raise RequestError(
            f"attention_mask: expected {expected.tolist()} columns of left padding as when the "
            f"rows began, got {padding.tolist()}; pass the mask of the whole sequence"
        )
    return np.maximum(known, padding)
