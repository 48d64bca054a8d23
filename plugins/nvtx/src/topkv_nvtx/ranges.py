"""NVTX as torch brings it along: builds without CUDA have its functions, which refuse."""

from __future__ import annotations

import torch
from attrs import frozen
from torch.cuda import nvtx

from topkv_authoring.libraries import Places, UnusableError, in_one_line


@frozen
class Ranges:
    """NVTX that works.

    Attributes:
        name: of the torch that has it.
    """

    name: str


def _try() -> Ranges:
    try:
        nvtx.mark("topkv looks for NVTX")
    except RuntimeError as error:
        raise UnusableError(in_one_line(error)) from error
    return Ranges(f"torch {torch.__version__}")


PLACES = Places(
    "this torch has no NVTX: install a build for CUDA, or take 'nvtx' out of observers",
    {"torch.cuda.nvtx": _try},
)


def describe() -> list[str]:
    """Return whether NVTX is usable here, or why not."""
    return PLACES.describe()
