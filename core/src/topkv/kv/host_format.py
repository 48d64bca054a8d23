"""How keys and values of grouped-query attention lie in the host pool, and their coded form.

``host_format`` is ``"model"``, an entry as the device has it, or ``"fp8"``, a code for each
element and an exponent for each row of D elements, one token's key or value of one kv-head:

    e4m3 codes [heads_per_lane, planes, unit, D] | exponents [heads_per_lane, planes, unit] | -

bytes all, filled up to a multiple of 16 with bytes that nobody writes or reads. An element is
``code * 2 ** (exponent - 127)``, and the exponent the least with ``max |x| <= 448 * scale``, not
below the one whose least code the model's dtype still holds as a normal number (fp16: holds at
all). So decoding is exact, and to encode what was decoded changes nothing: a token is rounded
once, when it is appended or its chunk arrives, and has this value on both tiers from then on.

A row of zeros has the least exponent. NaN and infinity become NaN, and count for no exponent.
Under the largest exponent the largest code is 240, for 256 and more would leave the dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor

from topkv.types import GroupShape, ModelShape

HOST_FORMATS = ("model", "fp8")

EXPONENTS = {torch.float16: (-15, 8), torch.bfloat16: (-117, 120), torch.float32: (-117, 120)}
"""Least and largest power of a scale, by the dtype of keys and values."""

E4M3_MAX, TOP_MAX = 448.0, 240.0
"""Largest code, and largest one under the largest exponent."""

BIAS, NAN_CODE = 127, 0x7F


def host_format_reasons(model: ModelShape, name: str) -> list[str]:
    """Why a model's keys and values cannot lie in the host pool as ``name``; empty if they can."""
    reasons = []
    if name != "model" and model.attention != "gqa":
        reasons.append(
            f"host_format {name!r} is for keys and values of grouped-query attention, got "
            f"{model.attention}, whose rows are packed on both tiers by kv_format; set "
            "host_format to 'model'"
        )
    elif name != "model" and model.dtype not in EXPONENTS:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in EXPONENTS)
        reasons.append(
            f"host_format {name!r} takes keys and values of {known}, got "
            f"{str(model.dtype).removeprefix('torch.')}; set host_format to 'model'"
        )
    return reasons


def encode_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 ``[..., D]`` and exponents uint8 ``[..., 1]`` of rows ``[..., D]``."""
    least, most = EXPONENTS[rows.dtype]
    finite = rows.isfinite()
    values = torch.where(finite, rows.float(), 0.0)
    amax = values.abs().amax(-1, keepdim=True)
    # 448 = 0.875 * 2 ** 9: the power follows from mantissa and exponent without rounding.
    mantissa, exponent = torch.frexp(amax)
    exponent = exponent - 8 - (mantissa <= 0.875).int()
    exponent = torch.where(amax > 0, exponent, least).clamp(least, most)
    largest = torch.where(exponent == most, TOP_MAX, E4M3_MAX)
    codes = torch.ldexp(values, -exponent).clamp(-largest, largest).to(torch.float8_e4m3fn)
    codes = torch.where(finite, codes.view(torch.uint8), NAN_CODE)
    return codes, (exponent + BIAS).to(torch.uint8)


def decode_rows(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows ``[..., D]`` of codes ``[..., D]`` and exponents ``[..., 1]``."""
    scale = (exponents.int() << 23).view(torch.float32)  # the bits of the power of two
    values = codes.view(torch.float8_e4m3fn).float() * scale
    return torch.where(values.isnan(), torch.nan, values.to(dtype))  # NaN of one kind


def rounded(rows: Tensor) -> Tensor:
    """Rows ``[..., D]`` as they come back from the host pool."""
    return decode_rows(*encode_rows(rows), rows.dtype)


class HostEntries(Protocol):
    """The entries of a group in the host pool, seen as rows."""

    def parts(self, entries: Tensor) -> Sequence[Tensor]:
        """Views ``[..., heads_per_lane, planes, unit, n]`` of entries of ``GroupStore.entries``,
        whatever lies in them for each row."""

    def encode(self, rows: Tensor) -> Sequence[Tensor]:
        """For each part what ``[..., n]`` it holds of rows ``[..., D]``, which are rounded."""

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        """Rows ``[..., D]`` of their parts."""


class PlainEntries:
    """Entries as the device has them; one part."""

    def parts(self, entries: Tensor) -> Sequence[Tensor]:
        return (entries,)

    def encode(self, rows: Tensor) -> Sequence[Tensor]:
        return (rows,)

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0]


@frozen
class CodedEntries:
    """Entries of codes and exponents, a part each."""

    group: GroupShape

    def parts(self, entries: Tensor) -> Sequence[Tensor]:
        heads, planes, unit, dim = self.group.entry_shape
        rows = heads * planes * unit
        codes, exponents = entries[..., : rows * dim], entries[..., rows * dim : rows * (dim + 1)]
        return [
            part.unflatten(-1, (heads, planes, unit, width))
            for part, width in ((codes, dim), (exponents, 1))
        ]

    def encode(self, rows: Tensor) -> Sequence[Tensor]:
        return encode_rows(rows)

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        codes, exponents = parts
        return decode_rows(codes, exponents, self.group.dtype)


def host_entries(group: GroupShape) -> HostEntries:
    """How the entries of a group lie in the host pool."""
    return PlainEntries() if group.host_format == "model" else CodedEntries(group)
