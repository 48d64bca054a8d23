"""Differences between two sets of tensors that should hold the same bytes, in one line."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _ordered(x: Tensor) -> Tensor:
    """Floating-point numbers as int64 that count them: neighbours differ by one."""
    bits = x.view(_BITS[x.dtype.itemsize]).long()
    least = -(2 ** (8 * x.dtype.itemsize - 1))
    return torch.where(bits < 0, least - bits, bits)


def difference(got: Tensor, expected: Tensor) -> str | None:
    """Say where two tensors of one shape differ most; None where they hold the same bytes.

    Args:
        got, expected: ``[rows, ...]``, on the CPU.

    Returns:
        How many rows differ, the worst element and both of its values. That is the element of the
        largest absolute difference; one that is NaN in one of the tensors comes first.
    """
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return (
            f"is {got.dtype} {list(got.shape)}, expected {expected.dtype} {list(expected.shape)}"
        )
    got, expected = got.contiguous(), expected.contiguous()
    bits = _BITS[got.dtype.itemsize]
    other = got.view(bits) != expected.view(bits)
    if not other.any():
        return None
    rows = other.flatten(1).any(1) if other.dim() > 1 else other
    apart = (got.double() - expected.double()).abs()
    apart = torch.where(other, apart.nan_to_num(nan=torch.inf), -1.0)
    flat = int(apart.argmax())
    row, *place = (int(i) for i in torch.unravel_index(torch.tensor(flat), got.shape))
    values = (got.flatten()[flat], expected.flatten()[flat])
    far = f"{float(apart.max()):.3g} apart"
    if got.is_floating_point() and all(bool(value.double().isfinite()) for value in values):
        one, two = (int(_ordered(value.reshape(1))) for value in values)
        far = f"{abs(one - two)} ULP, {far}"
    elif got.is_floating_point():
        far = "not finite"
    at = f", element {place}" if place else ""
    return (
        f"differs in {int(rows.sum())} of {len(rows)} rows; worst is row {row}{at}: "
        f"{values[0].item()!r} instead of {values[1].item()!r} ({far})"
    )


def require_same(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    """Require that two sets of tensors hold the same bytes.

    Args:
        got, expected: by name of the pool.
        what: for the message.

    Raises:
        AssertionError: with pool, row and worst element of each pool that differs.
    """
    found = {name: difference(got[name], expected[name]) for name in expected}
    reported = [f"pool {name!r} {text}" for name, text in found.items() if text]
    if reported:
        raise AssertionError(f"{what}: " + "; ".join(reported))
