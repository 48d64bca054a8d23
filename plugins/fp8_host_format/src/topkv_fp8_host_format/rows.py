"""Rows of keys and values as codes: a byte an element, beside an exponent and four words.

An entry of the host pool has, of each row of D elements, which is one token's key or value of one
kv-head,

    e4m3 codes [heads_per_lane, planes, unit, D] | - | words [heads_per_lane, planes, unit, 8]
    | exponents [heads_per_lane, planes, unit] | -

bytes all, filled up to a multiple of 8 and at the end of 16 with bytes that nobody writes or
reads. An element is ``code * 2 ** (exponent - 127)``, and the exponent the least with
``max |x| <= 448 * scale``, not below the one whose least code the model's dtype still holds as a
normal number (fp16: holds at all).

Keys of some models have a bias of several hundred in few channels, and the 4 bits of a code are
too coarse for products with it. So the four pairs of elements p and h + p, with
``h = (D + 1) // 2``, of the largest codes, of equal ones the lowest, have a word each: 16 bits,
from the lowest on 8 of p and 4 signed ones for either element. What these 4 bits say is added to
the element's own bits, as steps of its eighth significant bit: with them bfloat16 is exact but
for a tie, which is a step off. Codes below 8 have no more bits, nor has what is so small that
the dtype would not hold a step.

Decoding is exact, and to encode what was decoded changes nothing: a token is rounded
once, when it is appended or its chunk arrives, and has this value on both tiers from then on.

A row of zeros has the least exponent. NaN and infinity become NaN, and count for no exponent.
Under the largest exponent the largest code is 240, for 256 and more would leave the dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topkv_authoring.latent_fp8 import E4M3_MAX

EXPONENTS = {torch.float16: (-15, 8), torch.bfloat16: (-117, 120), torch.float32: (-117, 120)}
"""Least and largest power of a scale, by the dtype of keys and values."""

TOP_MAX = 240.0
"""Largest code under the largest exponent."""

BIAS, NAN_CODE = 127, 0x7F

FINE_PAIRS, FINE_BYTES = 4, 8
"""Pairs of a row that have more bits, and the bytes of their words."""

MOST_ELEMENTS = 512
"""The most elements of a row: a word has 8 bits for the number of a pair."""

STEP = 1 << 16
"""The eighth significant bit of an element, in the bits of fp32."""


def encode_rows(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 ``[..., D]``, words uint8 ``[..., 8]`` and exponents uint8 ``[..., 1]`` of rows
    ``[..., D]``."""
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
    fine = _steps(torch.ldexp(values, -exponent), codes)
    # Where a step is below what the dtype has, there are none.
    fine = torch.where((codes >> 3 & 15).int() - 7 + exponent < least + 2, 0, fine)
    return codes, _words(codes, fine), (exponent + BIAS).to(torch.uint8)


def _steps(scaled: Tensor, codes: Tensor) -> Tensor:
    """Steps by which elements exceed their codes in magnitude, int32, -7 to 7; 0 where codes
    are below 8, or NaN."""
    magnitude = (codes & 0x7F).int()
    off = scaled.abs().view(torch.int32) - _normal_bits(magnitude)
    steps = ((off + STEP // 2) >> 16).clamp(-7, 7)
    return torch.where((magnitude < 8) | (magnitude == NAN_CODE), 0, steps)


def _normal_bits(magnitude: Tensor) -> Tensor:
    """The bits of fp32 of codes of 8 and more, without their signs."""
    return (magnitude << 20) + (120 << 23)


def _words(codes: Tensor, steps: Tensor) -> Tensor:
    """The words of the pairs that have the largest codes; uint8 ``[..., 8]``."""
    dim = codes.shape[-1]
    half = (dim + 1) // 2
    fill = (0, 2 * half - dim)
    pairs = torch.nn.functional.pad((codes & 0x7F).int(), fill).unflatten(-1, (2, half))
    pair = pairs.amax(-2).sort(dim=-1, descending=True, stable=True).indices[..., :FINE_PAIRS]
    low, high = torch.nn.functional.pad(steps & 15, fill).unflatten(-1, (2, half)).unbind(-2)
    words = pair.int() | low.gather(-1, pair) << 8 | high.gather(-1, pair) << 12
    words = torch.nn.functional.pad(words, (0, FINE_PAIRS - words.shape[-1]))
    return torch.stack([words & 255, words >> 8], dim=-1).flatten(-2).to(torch.uint8)


def _steps_of(words: Tensor, dim: int) -> Tensor:
    """Steps int32 ``[..., dim]`` of words uint8 ``[..., 8]``."""
    half = (dim + 1) // 2
    pair, both = words.int().unflatten(-1, (FINE_PAIRS, 2)).unbind(-1)
    steps = torch.stack([both << 28 >> 28, both << 24 >> 28], dim=-2)
    at = pair.long().clamp(max=half - 1)[..., None, :].expand_as(steps)
    found = steps.new_zeros((*words.shape[:-1], 2, half)).scatter_add(-1, at, steps)
    return found.flatten(-2)[..., :dim]


def decode_rows(codes: Tensor, words: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows ``[..., D]`` of codes ``[..., D]``, words ``[..., 8]`` and exponents ``[..., 1]``."""
    scale = (exponents.int() << 23).view(torch.float32)  # the bits of the power of two
    values = codes.view(torch.float8_e4m3fn).float()
    bits = values.contiguous().view(torch.int32) + _steps_of(words, codes.shape[-1]) * STEP
    values = torch.where(values.isnan(), torch.nan, bits.view(torch.float32)) * scale
    return torch.where(values.isnan(), torch.nan, values.to(dtype))  # NaN of one kind


def rounded(rows: Tensor) -> Tensor:
    """Rows ``[..., D]`` as they come back from the host pool."""
    return decode_rows(*encode_rows(rows), rows.dtype)
