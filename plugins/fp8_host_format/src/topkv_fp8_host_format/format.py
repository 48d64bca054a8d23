"""The host format ``fp8`` in torch: entries of codes, words and exponents."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from topkv import hookimpl
from topkv.errors import CONFIG_REFUSED, ConfigError
from topkv.hooks.host_format import HostFormatSetup
from topkv_fp8_host_format.rows import (
    FINE_BYTES,
    MOST_ELEMENTS,
    decode_rows,
    encode_rows,
    rounded,
)


class Fp8:
    """Entries of codes, words and exponents, a part each; ``rows`` says what they are.

    Raises:
        ConfigError: rows have more elements than a word can number.
    """

    def __init__(self, setup: HostFormatSetup) -> None:
        self.group = setup.group
        if self.group.head_dim > MOST_ELEMENTS:
            reason = (
                f"host_format 'fp8' takes keys and values of at most {MOST_ELEMENTS} elements, "
                f"got {self.group.head_dim}; set host_format to 'model'"
            )
            raise ConfigError(CONFIG_REFUSED, [reason])

    def _sizes(self) -> list[int]:
        """Return the bytes of each part of an entry."""
        heads, planes, unit, dim = self.group.entry_shape
        return [heads * planes * unit * width for width in (dim, FINE_BYTES, 1)]

    @hookimpl
    def coded_bytes(self) -> int:
        codes, words, exponents = self._sizes()
        return -(-(-(-codes // 8) * 8 + words + exponents) // 16) * 16

    @hookimpl
    def round(
        self, k: Tensor, v: Tensor, out: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        return rounded(k), rounded(v)

    @hookimpl
    def parts(self, entries: Tensor) -> Sequence[Tensor]:
        parts, at = [], 0
        for size in self._sizes():
            part = entries[..., at : at + size]
            parts.append(part.unflatten(-1, (*self.group.entry_shape[:3], -1)))
            at += -(-size // 8) * 8
        return parts

    @hookimpl
    def encode(self, rows: Tensor) -> Sequence[Tensor]:
        return encode_rows(rows)

    @hookimpl
    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        codes, words, exponents = parts
        return decode_rows(codes, words, exponents, self.group.dtype)
