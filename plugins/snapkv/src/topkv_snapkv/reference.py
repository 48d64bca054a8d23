"""SnapKV's choice, which is cold, and its selection in plain torch.

Shapes: n tokens of the prompt, N lanes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topkv.hooks.topk import TopK
from topkv.ops.topk import topk

NEVER = torch.iinfo(torch.int32).max
"""Stands for no position; sorts behind every one."""


def best(scores: Tensor, count: int, work: TopK | None) -> Tensor:
    """int32 ``[N, count]`` positions of the best scores, ascending, -1 behind them.

    ``work`` is from ``AlgorithmSetup.topk``; None for plain torch.
    """
    ids = torch.empty((len(scores), count), dtype=torch.int32, device=scores.device)
    lengths = torch.full((len(scores),), scores.shape[1], dtype=torch.int32, device=ids.device)
    impl = "reference" if work is None else "triton"
    topk(scores.contiguous(), lengths, ids, impl=impl, work=work)
    return ids


def select(
    kept: Tensor, count: Tensor, prompt: Tensor, last: Tensor, cap: int, room: int, width: int
) -> Tensor:
    """The kept positions of each lane, then the newest generated ones. Hot.

    Args:
        kept: ``[N, cap or more]`` ascending, -1 behind ``count``.
        count: ``[N]``.
        prompt: ``[N]`` tokens of the prompt; generated ones follow.
        last: ``[N]`` position of the first new token; those before it are selectable.
        cap: places for the prompt. What a shorter prompt leaves free goes to generated tokens.
        room: places for generated tokens.
        width: K.

    Returns:
        ``[N, K]``: nothing from ``last`` on, even where the prompt was cut since.
    """
    count, prompt, last = count[:, None], prompt[:, None], last[:, None]
    column = torch.arange(width, device=kept.device)
    inside = torch.nn.functional.pad(kept, (0, width - kept.shape[1]), value=-1)
    first = torch.maximum(prompt, last - room - (cap - prompt).clamp(min=0))
    ids = torch.where(column < count, inside, first + column - count)
    return torch.where(ids < last, ids, -1)
