"""Rows of a step in the order in which topkv has them, where that is not the engine's.

An engine puts the tokens of a request side by side, as many as it has, and decides the order of
requests. topkv has the rows of those that decode in front, as many of each, padding included. The
two are the same in most steps, and in all that are replayed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor


@frozen
class Order:
    """Where the rows of either side stand on the other one.

    Attributes:
        taken: int64 ``[rows of topkv]``, the row of the engine that each is; one that pads a
            request is its newest.
        given: int64 ``[rows of the engine]``, the row of topkv that each is.
    """

    taken: Tensor
    given: Tensor


def order(
    decoded: Sequence[tuple[int, int]],
    chunks: Sequence[tuple[int, int]],
    queries: int,
    device: torch.device,
) -> Order:
    """Make the order of a step.

    Args:
        decoded: first row and tokens of each request that decodes, in the engine's order.
        chunks: the same of prompts.
        queries: Q, the most tokens of a request that decodes.
        device: of the rows.
    """
    first, tokens = np.array(decoded).T[:, :, None]
    padded = first + np.minimum(np.arange(queries), tokens - 1)
    taken = np.concatenate(
        [padded.ravel(), *(np.arange(start, start + count) for start, count in chunks)]
    )
    # Of rows that padding repeats, the first one stands for the token.
    given = np.unique(taken, return_index=True)[1]
    return Order(sent(taken, device), sent(given, device))


def sent(places: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    """Send places to a device, int64; from memory that is not pinned the host would wait."""
    made = torch.from_numpy(np.asarray(places, dtype=np.int64))
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made
