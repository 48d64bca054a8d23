"""Partial results of attention folded into one, by both implementations, against float64."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from topkv.ops.chunk_attention import Chosen, kept, merge  # noqa: E402

NEEDS_GPU = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
CASES = [
    ("reference", "cpu"),
    pytest.param("triton", "cuda", marks=[pytest.mark.gpu, NEEDS_GPU]),
]
if not CUDA:
    CASES.append(("triton", "cpu"))

ROWS = st.lists(st.lists(st.integers(-1, 9), min_size=3, max_size=3), min_size=1, max_size=4)
"""Units that each row of a prompt has selected."""

LOGITS = st.sampled_from([0.0, 3.0, -80.0, 90.0, -1e4, 1e4, -torch.inf])
"""LSE of parts, also far beyond what fp32 can take exponentials of; -inf if nothing is seen."""


@st.composite
def parts(draw):
    """Two results of as many rows and heads as are drawn; those that see nothing are 0."""
    shape = (draw(st.integers(0, 9)), draw(st.integers(1, 5)), draw(st.sampled_from([1, 24, 64])))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    found = []
    for _ in range(2):
        about = torch.tensor([draw(LOGITS) for _ in range(shape[1])])
        lse = about + torch.randn(shape[:2], generator=random)
        out = torch.randn(shape, generator=random).masked_fill(lse[..., None] == -torch.inf, 0.0)
        found.append((out, lse))
    return found


def expected(found):
    """Merge in float64, by the definition: the average by exp(lse)."""
    outs, logs = (torch.stack(each).double() for each in zip(*found, strict=True))
    lse = torch.logsumexp(logs, 0)
    weights = torch.exp(logs - lse.masked_fill(lse == -torch.inf, 0.0))
    return (weights.unsqueeze(-1) * outs).sum(0), lse


@pytest.mark.parametrize(("impl", "device"), CASES)
def test_parts_are_merged(impl, device):
    @given(parts())
    def check(found):
        out, lse = expected(found)
        (one, one_lse), (other, other_lse) = (
            [each.to(device, copy=True) for each in part] for part in found
        )
        merge(one, one_lse, other, other_lse, impl=impl)
        torch.testing.assert_close(one.cpu().double(), out, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(one_lse.cpu().double(), lse, atol=1e-5, rtol=1e-6)
        assert torch.equal(other.cpu(), found[1][0])

    check()


@pytest.mark.gpu
@NEEDS_GPU
def test_places_behind_two_to_the_31_are_merged():
    rows, heads, dim = 2**24 + 3, 1, 128
    out, part = (torch.full((rows, heads, dim), value, device="cuda") for value in (1.0, 3.0))
    lse, part_lse = (torch.zeros(rows, heads, device="cuda") for _ in range(2))
    merge(out, lse, part, part_lse, impl="triton")
    assert torch.all(out == 2.0)


def test_a_block_of_keys_shows_what_rows_have_selected():
    @given(ROWS, st.sampled_from([1, 2, 5]), st.integers(0, 30), st.integers(0, 30))
    def check(rows, unit, first, count):
        ids = torch.tensor(rows, dtype=torch.int32)[:, None]
        columns = Chosen(ids, unit).columns(slice(None), 0, first, count)
        assert columns.dtype == torch.int32
        masks = kept(columns, count).tolist()
        for row, mask, listed in zip(rows, masks, columns.tolist(), strict=True):
            tokens = {each * unit + i - first for each in row if each >= 0 for i in range(unit)}
            want = {token for token in tokens if 0 <= token < count}
            assert {token for token, shown in enumerate(mask) if shown} == want
            assert {*listed} - {-1} == want

    check()
