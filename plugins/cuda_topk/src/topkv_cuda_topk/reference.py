"""Places at which ``search.cuh`` draws samples of a row, for tests.

The selection itself has the reference of the core, ``topkv.ops.topk_reference``.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = (1 << 32) - 1


def places(columns: int, samples: int) -> Tensor:
    """Places at which rows of ``columns`` scores are sampled, int64 ``[samples]``.

    There is one in each of ``samples`` equal parts. As a fraction of the columns in 32 bits its
    upper bits are the part, and a hash of the part gives the lower ones. Places behind the end of
    a row are left out.
    """
    part = torch.arange(samples)
    mix = part * 0x9E3779B1 & WORD
    mix = (mix ^ mix >> 15) * 0x85EBCA77 & WORD
    fraction = part * ((1 << 32) // samples) + (mix ^ mix >> 13) // samples
    return fraction * columns >> 32
