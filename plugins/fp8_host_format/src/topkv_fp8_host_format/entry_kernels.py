"""The host format ``fp8`` by kernels, and the device functions that read and write its entries.

Their arguments are those of ``topkv.hooks.host_format.EntryKernels``.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from topkv import hookimpl
from topkv.hooks.host_format import EntryKernels
from topkv.kv.entry_kernels import read_plain, write_plain
from topkv_fp8_host_format.format import Fp8
from topkv_fp8_host_format.row_kernels import decode_rows, encode_rows, round_rows


@triton.jit
def _behind(p_entry, at, SIZE: tl.constexpr, D: tl.constexpr):
    """Return pointers to the words and exponents of rows, behind the SIZE codes of an entry."""
    p_words = p_entry + (SIZE + 7) // 8 * 8
    p_exponents = p_words + SIZE // D * 8
    return p_words.to(tl.pointer_type(tl.int64), bitcast=True) + at // D, p_exponents + at // D


@triton.jit
def read_coded(p_entry, at, d, live, mask, SIZE: tl.constexpr, D: tl.constexpr):
    """Read codes, and the words and exponents of their rows."""
    codes = read_plain(p_entry, at, d, live, mask, SIZE, D)
    p_words, p_exponents = _behind(p_entry, at, SIZE, D)
    # All warps of a program read the same few: the link is asked once, and the L1 cache then.
    words = tl.load(p_words, live, other=0, cache_modifier=".ca")
    return codes, words, tl.load(p_exponents, live, other=0, cache_modifier=".ca")


@triton.jit
def decode_coded(data, at, d, DTYPE: tl.constexpr, D: tl.constexpr):
    """Decode the result of ``read_coded`` to the dtype of the device."""
    codes, words, exponents = data
    nth = (at % D).to(tl.int32)[:, None] + d[None, :]
    return decode_rows(codes, words[:, None], exponents[:, None], nth, DTYPE, D)


@triton.jit
def write_coded(p_entry, at, d, x, live, mask, SIZE: tl.constexpr, D: tl.constexpr):
    """Code and write whole rows; ``x`` is 0 where it is masked out."""
    codes, words, exponents = encode_rows(x, D)
    write_plain(p_entry, at, d, codes, live, mask, SIZE, D)
    p_words, p_exponents = _behind(p_entry, at, SIZE, D)
    tl.store(p_words, words, live)
    tl.store(p_exponents, exponents, live)


CODED_KERNELS = EntryKernels(read_coded, decode_coded, write_coded, rows=16, warps=8)


class Fp8Kernels(Fp8):
    """``fp8`` where kernels round rows and move them."""

    @hookimpl
    def round(
        self, k: Tensor, v: Tensor, out: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        k_out, v_out = out or (x.new_empty(x.shape) for x in (k, v))
        round_rows(k, v, k_out, v_out)
        return k_out, v_out

    @hookimpl
    def kernels(self) -> EntryKernels:
        return CODED_KERNELS
