"""Device functions that read and write entries of the host pool, plain or coded.

Plain entries are as the device has them; ``topkv.kv.host_format`` says what coded ones are. The
kernels that copy take functions of one kind and are compiled for them, so that plain copies have
no code for coded entries.

``p_entry + at`` points to the first of BLOCK elements in a row of D, ``[n]``; ``live`` says which
of them are meant, ``mask`` which elements ``[n, BLOCK]``, of which ``d`` are the numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topkv.kv.row_kernels import decode_rows, encode_rows


@triton.jit
def read_plain(p_entry, at, d, live, mask, SIZE: tl.constexpr, D: tl.constexpr):
    """Read elements as they are."""
    p_data = (p_entry + at)[:, None] + d[None, :]
    return tl.load(p_data, mask, other=0, cache_modifier=".cg")


@triton.jit
def decode_plain(data, at, d, DTYPE: tl.constexpr, D: tl.constexpr):
    """Return the elements of ``read_plain`` unchanged."""
    return data


@triton.jit
def write_plain(
    p_entry,
    at,
    d,
    x,
    live,
    mask,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
):
    """Write elements as they are."""
    tl.store((p_entry + at)[:, None] + d[None, :], x, mask)


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
def write_coded(
    p_entry,
    at,
    d,
    x,
    live,
    mask,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
):
    """Code and write whole rows; ``x`` is 0 where it is masked out."""
    codes, words, exponents = encode_rows(x.to(tl.float32), LEAST, MOST, D)
    write_plain(p_entry, at, d, codes, live, mask, SIZE, D, LEAST, MOST)
    p_words, p_exponents = _behind(p_entry, at, SIZE, D)
    tl.store(p_words, words, live)
    tl.store(p_exponents, exponents, live)
