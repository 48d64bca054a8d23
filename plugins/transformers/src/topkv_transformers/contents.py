"""A hash over every byte of a tensor, on whatever device it is: XXH3 of 128 bits on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import xxhash
from torch import Tensor

CHUNK = 1 << 25
"""Bytes that are copied from a GPU while those before them are hashed."""


@torch.no_grad()
def contents_of(tensors: Sequence[Tensor]) -> list[str]:
    """The hash of each tensor; of equal elements in equal order it is equal on every device."""
    pinned: list[Tensor] = []
    if any(tensor.is_cuda for tensor in tensors):
        pinned = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    return [_hash(tensor, pinned) for tensor in tensors]


def _hash(tensor: Tensor, pinned: list[Tensor]) -> str:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    digest = xxhash.xxh3_128()
    for piece in _copied(raw, pinned) if raw.is_cuda else [raw.cpu()]:
        digest.update(piece.numpy())
    return digest.hexdigest()


def _copied(raw: Tensor, pinned: list[Tensor]) -> Iterator[Tensor]:
    """Bytes of a GPU, on the host in pieces; each is valid until the next one is asked for."""
    copied = [torch.cuda.Event() for _ in pinned]
    pieces = raw.split(CHUNK)
    for number in range(len(pieces) + 1):
        if number < len(pieces):
            turn = number % 2
            pinned[turn][: len(pieces[number])].copy_(pieces[number], non_blocking=True)
            copied[turn].record()
        if number:
            turn = (number - 1) % 2
            copied[turn].synchronize()
            yield pinned[turn][: len(pieces[number - 1])]
