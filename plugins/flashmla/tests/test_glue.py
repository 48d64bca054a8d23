"""Code around the library: kernels against the reference, and the reference itself."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from topkv_flashmla import kernels, reference  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
MARKS = [pytest.mark.gpu] if CUDA else []
ON = pytest.mark.parametrize("device", [pytest.param(DEVICE, marks=MARKS)])


def test_a_query_sees_all_but_the_tokens_behind_it():
    seen = reference.seen(torch.tensor([9, 2, 0]), torch.tensor([3, 4, 1]), 4)
    assert seen.tolist() == [[7, 8, 9, 0], [0, 0, 1, 2], [0, 0, 0, 0]]


def test_queries_move_behind_their_padding():
    q = torch.arange(1.0, 9.0).view(2, 4, 1, 1)
    moved = reference.shifted(q, torch.tensor([3, 1]))
    assert moved.flatten(1).tolist() == [[0, 1, 2, 3], [0, 0, 0, 5]]


@ON
def test_the_kernel_moves_the_same_queries(device):
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(3, 5, 9, 72, generator=generator).bfloat16().to(device)
    q, queries = wide[:, :4, :5, :70], torch.tensor([4, 1, 3], dtype=torch.int32, device=device)
    q[1, 1:], q[2, 3] = torch.nan, torch.nan
    moved = torch.full((3 * 4 + 1, 5, 70), -77.0, device=device).bfloat16()
    kernels.shift_kernel[(12, 2)](
        *(q, queries, moved, 5, *q.stride()[:3]), QUERIES=4, DIM=70, BLOCK_D=128, BLOCK_H=4
    )
    assert torch.equal(moved[:12].view(3, 4, 5, 70), reference.shifted(q, queries))
    assert (moved[12] == -77).all(), "wrote behind the last lane"


def test_indices_are_the_rows_of_the_tokens_in_order():
    table = torch.tensor([[5, 2, 0], [7, 0, 0], [9, 9, 9]])
    rows = reference.indices(table, torch.tensor([5, 2, 0]), 2, 7)
    assert rows.tolist() == [
        [10, 11, 4, 5, 0, -1, -1],
        [14, 15, -1, -1, -1, -1, -1],
        [-1] * 7,
    ]


@ON
def test_the_kernel_lists_the_same_rows(device):
    @given(
        data=st.data(),
        unit=st.sampled_from([1, 2, 16]),
        most=st.integers(1, 4),
        seed=st.integers(0, 999),
    )
    @settings(deadline=None, max_examples=20)
    def check(data, unit, most, seed):
        units, lanes = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
        width = -(-units * unit // 64) * 64
        lengths = torch.tensor(
            [data.draw(st.integers(0, units * unit)) for _ in range(lanes)], dtype=torch.int32
        )
        generator = torch.Generator().manual_seed(seed)
        table = torch.randint(0, 2**26, (lanes, units), generator=generator).int()
        rows = lanes * most
        out = torch.full((rows, 1, width + 8), -77, dtype=torch.int32, device=device)
        queries = torch.tensor(
            [data.draw(st.integers(1, most)) for _ in range(lanes)], dtype=torch.int32
        )
        kernels.indices_kernel[(rows, -(-width // 64))](
            *(table.to(device), lengths.to(device), out, width, table.stride(0), out.stride(0)),
            UNIT=unit,
            BLOCK=64,
            QUERIES=most,
            p_queries=queries.to(device) if most > 1 else None,
        )
        seen = reference.seen(lengths, queries, most).flatten()
        expected = reference.indices(table.repeat_interleave(most, 0), seen, unit, width)
        assert torch.equal(out[:, 0, :width].cpu(), expected)
        assert (out[:, 0, width:] == -77).all(), "wrote behind its row"

    check()


@ON
def test_empty_lanes_and_padded_heads(device):
    lengths = torch.tensor([3, 0, 1], dtype=torch.int32, device=device)
    given_out = torch.randn(3, 1, 8, 16, device=device)
    given_lse = torch.randn(3, 8, device=device)
    given_out[1], given_lse[1] = torch.nan, torch.inf
    out = torch.full((3, 1, 5, 16), torch.nan, device=device)
    lse = torch.full((3, 1, 5), torch.nan, device=device)
    kernels.finish_kernel[(3, 2)](
        *(given_out, given_lse, lengths, out, lse, 5),
        *(given_out.stride(0), given_out.stride(2), *given_lse.stride()),
        *(out.stride(0), out.stride(2)),
        BLOCK_H=4,
        DIM=16,
    )
    assert torch.equal(out[[0, 2]], given_out[[0, 2], :, :5])
    assert torch.equal(lse[[0, 2], 0], given_lse[[0, 2], :5])
    assert (out[1] == 0).all()
    assert (lse[1] == -torch.inf).all()
    same_out, same_lse = reference.finish(given_out[:, 0], given_lse, lengths, 5)
    assert torch.equal(out[:, 0], same_out)
    assert torch.equal(lse[:, 0], same_lse)


@ON
@pytest.mark.parametrize("shifted", [False, True])
def test_padding_and_what_sees_nothing_is_empty(device, shifted):
    """The second lane has fewer tokens than queries; the LSE comes by head, as the library's."""
    most, heads = 4, 8
    lengths = torch.tensor([9, 2, 0], dtype=torch.int32, device=device)
    queries = torch.tensor([3, 4, 2], dtype=torch.int32, device=device)
    result = torch.randn(3, most, heads, 16, device=device)
    log = torch.randn(3, heads, most, device=device).mT
    given_out, given_log = result, log
    if shifted:  # as the library gives it
        back = (torch.arange(most, device=device) - most + queries[:, None]) % most
        row = torch.arange(3, device=device)[:, None]
        given_out, given_log = result[row, back], log[row, back].mT.contiguous().mT
    wide = torch.full((3, most + 1, 7, 16), -77.0, device=device)
    out, lse = wide[:, :most, :5], torch.full((3, most, 5), torch.nan, device=device)
    kernels.finish_kernel[(3 * most, 2)](
        *(given_out, given_log, lengths, out, lse, 5),
        *(given_out.stride(0), given_out.stride(2), given_log.stride(0), given_log.stride(2)),
        *(out.stride(0), out.stride(2)),
        BLOCK_H=4,
        DIM=16,
        QUERIES=most,
        SHIFTED=shifted,
        p_queries=queries,
        s_from_query=given_out.stride(1),
        s_lse_query=given_log.stride(1),
        s_out_query=out.stride(1),
    )
    seen = reference.seen(lengths, queries, most).flatten()
    want, norm = reference.finish(result.flatten(0, 1), log.flatten(0, 1), seen, 5)
    assert torch.equal(out.flatten(0, 1), want)
    assert torch.equal(lse.flatten(0, 1), norm)
    assert (wide[:, most] == -77).all()
    assert (wide[:, :, 5:] == -77).all()


@ON
def test_columns_that_causality_shows(device):
    """The list is in any order; the kernel reads it in blocks and writes one behind the other."""

    @given(
        st.lists(st.lists(st.integers(-1, 9), min_size=9, max_size=9), min_size=1, max_size=4),
        st.integers(-5, 12),
        st.booleans(),
    )
    @settings(deadline=None, max_examples=40)
    def check(rows, ahead, shared):
        """``shared``: one list for all rows, as of a prompt in which each sees all before it."""
        ids = torch.tensor(rows[:1] if shared else rows, dtype=torch.int32, device=device)
        ids = ids.expand(len(rows), -1)
        indices = torch.full((len(rows) + 1, 12), -77, dtype=torch.int32, device=device)
        counts = torch.full((len(rows) + 1,), -77, dtype=torch.int32, device=device)
        kernels.shown_kernel[(len(rows),)](
            *(ids, indices, counts, 9, 12, ahead, ids.stride(0)), BLOCK=4
        )
        expected, many = reference.shown(ids, ahead, 12)
        for row, (listed, got) in enumerate(zip(ids.tolist(), expected.tolist(), strict=True)):
            want = [each for each in listed if 0 <= each <= ahead + row]
            assert got == want + [-1] * (12 - len(want))
            assert many[row] == len(want)
        assert torch.equal(indices[:-1], expected)
        assert torch.equal(counts[:-1], many)
        assert (indices[-1] == -77).all()
        assert counts[-1] == -77

    check()
