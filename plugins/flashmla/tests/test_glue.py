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
    @given(data=st.data(), unit=st.sampled_from([1, 2, 16]), seed=st.integers(0, 999))
    @settings(deadline=None, max_examples=20)
    def check(data, unit, seed):
        units, lanes = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
        width = -(-units * unit // 64) * 64
        lengths = torch.tensor(
            [data.draw(st.integers(0, units * unit)) for _ in range(lanes)], dtype=torch.int32
        )
        generator = torch.Generator().manual_seed(seed)
        table = torch.randint(0, 2**26, (lanes, units), generator=generator).int()
        out = torch.full((lanes, 1, width + 8), -77, dtype=torch.int32, device=device)
        kernels.indices_kernel[(lanes, -(-width // 64))](
            *(table.to(device), lengths.to(device), out, width, table.stride(0), out.stride(0)),
            UNIT=unit,
            BLOCK=64,
        )
        expected = reference.indices(table, lengths, unit, width)
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


@given(st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=4))
@settings(deadline=None, max_examples=40)
def test_kept_columns_are_listed(rows):
    found = reference.listed(torch.tensor(rows), 4)
    assert found.shape[1] % 4 == 0
    for row, got in zip(rows, found.tolist(), strict=True):
        columns = [i for i, kept in enumerate(row) if kept]
        assert got == columns + [-1] * (found.shape[1] - len(columns))
