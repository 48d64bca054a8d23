"""Code around the library: the kernel and the reference, against plain Python."""

from __future__ import annotations

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from topkv_flash_attention import kernels, reference  # noqa: E402
from topkv_flash_attention.backend import ACCUMULATORS, _most_splits  # noqa: E402
from topkv_testing.backend.bench import columns_of  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
MARKS = [pytest.mark.gpu] if CUDA else []
ON = pytest.mark.parametrize("device", [pytest.param(DEVICE, marks=MARKS)])


@ON
@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (5, 72), (9, 16)])
def test_empty_lanes_and_the_layout_of_the_lse(device, copy, heads, dim):
    lengths = torch.tensor([3, 0, 1], dtype=torch.int32, device=device)
    given_out = torch.randn(3, 1, heads, dim, device=device).bfloat16()
    given_lse = torch.randn(3, heads, 2, device=device)[:, :, 1]  # strided
    given_out[1], given_lse[1] = torch.nan, torch.inf
    wide = torch.full((3, 1, heads, dim + 8), torch.nan, device=device).bfloat16()
    out = wide[..., :dim]
    if not copy:
        out.copy_(given_out)
    result = given_out if copy else out
    lse = torch.full((3, 1, heads), torch.nan, device=device)
    kernels.finish_kernel[(3, -(-heads // 8))](
        *(result, given_lse, lengths, out, lse, heads),
        *(result.stride(0), result.stride(2), *given_lse.stride()),
        *(out.stride(0), out.stride(2), lse.stride(0), lse.stride(2)),
        COPY=copy,
        LANES=1,
        DIM=dim,
        BLOCK_D=128,
        BLOCK_H=8,
    )
    for lane, length in enumerate(lengths.tolist()):
        full = length > 0
        want = given_out[lane] if full else torch.zeros_like(given_out[lane])
        assert torch.equal(out[lane], want)
        assert torch.equal(
            lse[lane, 0], given_lse[lane] if full else torch.full_like(lse[lane, 0], -math.inf)
        )
    assert wide[..., dim:].isnan().all(), "wrote beside its rows"
    same = reference.finish(given_out, given_lse[:, None], lengths)
    assert torch.equal(out, same[0])
    assert torch.equal(lse, same[1])


@ON
@pytest.mark.parametrize("copy", [True, False])
def test_results_of_lanes_go_to_their_rows(device, copy):
    """Rows of outputs and of the LSE are further apart than their heads."""
    lanes, heads, dim, each = 6, 3, 16, 2
    lengths = torch.tensor([3, 0, 1, 9, 2, 0], dtype=torch.int32, device=device)
    given_out = torch.randn(lanes, 1, heads, dim, device=device)
    given_lse = torch.randn(lanes, heads, device=device)
    wide = torch.full((3, 1, each * heads + 2, dim), -77.0, device=device)
    wide_lse = torch.full((3, 1, each * heads + 2), -77.0, device=device)
    out, lse = wide[:, :, : each * heads], wide_lse[:, :, : each * heads]
    if not copy:
        out.copy_(given_out.view(out.shape))
    kernels.finish_kernel[(lanes, 1)](
        *(given_out if copy else out, given_lse, lengths, out, lse, heads),
        *(given_out.stride(0), given_out.stride(2), *given_lse.stride()),
        *(out.stride(0), out.stride(2), lse.stride(0), lse.stride(2)),
        COPY=copy,
        LANES=each,
        DIM=dim,
        BLOCK_D=dim,
        BLOCK_H=8,
    )
    want, log = reference.finish(given_out, given_lse[:, None], lengths)
    assert torch.equal(out, want.view(out.shape))
    assert torch.equal(lse, log.view(lse.shape))
    assert (wide[:, :, each * heads :] == -77).all()
    assert (wide_lse[:, :, each * heads :] == -77).all()


def test_padding_and_what_sees_nothing_is_empty():
    """The second lane has fewer tokens than queries: its first query sees none."""
    out, lse = torch.ones(3, 4, 2, 8), torch.ones(3, 4, 2)
    lengths, queries = torch.tensor([9, 2, 0]), torch.tensor([4, 3, 2])
    full = [[True] * 4, [False, True, True, False], [False] * 4]
    got, log = reference.finish(out, lse, lengths, queries)
    assert (got == 1).all(-1).all(-1).tolist() == full
    assert (log == 1).all(-1).tolist() == full
    assert (log == -math.inf).all(-1).tolist() == [[not each for each in row] for row in full]


@ON
@pytest.mark.parametrize("copy", [True, False])
def test_several_queries_go_to_their_rows(device, copy):
    """Results of the library are a packed sequence, its LSE by head."""
    rows, each, most, heads, dim = 3, 2, 4, 3, 16
    lanes = rows * each
    lengths = torch.tensor([3, 0, 1, 9, 2, 0], dtype=torch.int32, device=device)
    queries = torch.tensor([4, 3, 1], dtype=torch.int32, device=device)
    given_out = torch.randn(lanes, most, heads, dim, device=device)
    given_lse = torch.randn(heads, lanes * most, device=device).T.unflatten(0, (lanes, most))
    wide = torch.full((rows, most, each * heads + 2, dim), -77.0, device=device)
    wide_lse = torch.full((rows, most, each * heads + 2), -77.0, device=device)
    out, lse = wide[:, :, : each * heads], wide_lse[:, :, : each * heads]

    def by_row(x):
        return x.unflatten(0, (rows, each)).transpose(1, 2).flatten(2, 3)

    if not copy:
        out.copy_(by_row(given_out))
    given = given_out if copy else out.unflatten(2, (each, heads)).transpose(1, 2).flatten(0, 1)
    kernels.finish_kernel[(lanes * most, 1)](
        *(given, given_lse, lengths, out, lse, heads),
        *(given.stride(0), given.stride(2), given_lse.stride(0), given_lse.stride(2)),
        *(out.stride(0), out.stride(2), lse.stride(0), lse.stride(2)),
        COPY=copy,
        LANES=each,
        DIM=dim,
        BLOCK_D=dim,
        BLOCK_H=8,
        QUERIES=most,
        p_queries=queries,
        s_from_query=given.stride(1),
        s_from_lse_query=given_lse.stride(1),
        s_out_query=out.stride(1),
        s_lse_query=lse.stride(1),
    )
    counts = queries.repeat_interleave(each)
    want, log = reference.finish(given_out, given_lse, lengths, counts)
    assert torch.equal(out, by_row(want))
    assert torch.equal(lse, by_row(log))
    assert (wide[:, :, each * heads :] == -77).all()
    assert (wide_lse[:, :, each * heads :] == -77).all()


@given(st.integers(1, 9), st.integers(0, 9), st.integers(-12, 12))
@settings(deadline=None, max_examples=300)
def test_spans_are_causal_attention(rows, keys, shift):
    """Each call, with its mask at the bottom right, shows exactly what causality shows."""
    seen = [[False] * keys for _ in range(rows)]
    for at, many, causal in reference.spans(rows, keys, shift):
        inside = list(range(rows))[at]
        assert inside
        assert 0 < many <= keys
        for place, row in enumerate(inside):
            for key in range(many):
                shows = not causal or key <= place + many - len(inside)
                assert not seen[row][key], "seen twice"
                seen[row][key] = shows
            assert any(seen[row]), "a row in a call sees something"
    assert seen == [[key <= row + shift for key in range(keys)] for row in range(rows)]


def test_the_usual_chunks_are_one_call():
    assert reference.spans(8, 8, 0) == [(slice(0, 8), 8, True)]
    assert reference.spans(8, 20, 20) == [(slice(0, 8), 20, False)]
    assert reference.spans(8, 20, 12) == [(slice(0, 8), 20, True)]


@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=4))
@settings(deadline=None, max_examples=60)
def test_columns_become_a_table(rows):
    table, lengths = reference.listed(columns_of(torch.tensor(rows)))
    assert table.dtype == lengths.dtype == torch.int32
    for row, listed, count in zip(rows, table.tolist(), lengths.tolist(), strict=True):
        columns = [i for i, kept in enumerate(row) if kept]
        assert listed == columns[::-1] + [0] * (table.shape[1] - len(columns))
        assert count == len(columns)


def test_rows_are_copied_only_where_they_must_be():
    pool = torch.zeros(4, 3, 24, dtype=torch.bfloat16)
    for rows in (pool, pool[..., 8:16], pool.transpose(0, 1), pool[:1, :, :8]):
        assert reference.aligned(rows).data_ptr() == rows.data_ptr()
    odd = torch.arange(4 * 3 * 20.0).view(4, 3, 20).bfloat16()
    for rows in (odd[..., :8], pool[..., 3:11], pool[..., ::3], pool.flatten()[1:73].view(3, 24)):
        copy = reference.aligned(rows)
        assert torch.equal(copy, rows)
        assert copy.data_ptr() % 16 == 0
        assert all(stride * 2 % 16 == 0 for stride in copy.stride()[:-1])


def test_splits_are_bounded_by_what_they_cost():
    assert _most_splits(32 * 128, 2048) == 0
    assert _most_splits(64 * 128 * 512, 2048) == 16
    assert _most_splits(ACCUMULATORS, 2048) == 1
    for outputs in (4096, 2**20, 2**22, 2**26):
        splits = _most_splits(outputs, 10**6)
        assert 4 * outputs * (splits or 128) <= ACCUMULATORS or splits == 1
