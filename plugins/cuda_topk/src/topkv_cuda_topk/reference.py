"""What ``search.cuh`` draws of a row and the key that it looks for among that, for tests.

The selection itself has the reference of the core, ``topkv.ops.topk_reference``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from topkv_cuda_topk.shapes import PIVOT_SIGMAS, SLACK

WORD = (1 << 32) - 1


def places(length: int, samples: int) -> Tensor:
    """Where a row of ``length`` scores is sampled, int64 ``[samples]``.

    A place in each of ``samples`` equal parts. As a fraction of the row in 32 bits its upper bits
    are the part, and a hash of the part gives the lower ones.
    """
    part = torch.arange(samples)
    mix = part * 0x9E3779B1 & WORD
    mix = (mix ^ mix >> 15) * 0x85EBCA77 & WORD
    fraction = part * ((1 << 32) // samples) + (mix ^ mix >> 13) // samples
    return fraction * length >> 32


def ranks(length: int, select: int, samples: int) -> tuple[int, int]:
    """First and last rank that the pivot may have among the samples."""
    mean = samples * select / length
    rank = min(int(mean + PIVOT_SIGMAS * math.sqrt(mean)) + 4, samples)
    return rank, rank + rank // SLACK
