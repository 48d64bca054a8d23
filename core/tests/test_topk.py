"""Exact top-k beyond the suite: rows read from memory in small steps, and refusals."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from topkv.hooks.topk import TopKSetup  # noqa: E402
from topkv.ops import topk_kernels  # noqa: E402
from topkv.ops.topk import RadixTopK, topk  # noqa: E402
from topkv_testing.topks import ODD_BITS, check, long_rows  # noqa: E402

pytestmark = [pytest.mark.gpu] if CUDA else []
DEVICE = torch.device("cuda" if CUDA else "cpu")


def radix(scores, lengths, select):
    """Compare the kernels of ``radix`` with the definition."""
    check(RadixTopK(TopKSetup(*scores.shape, select, DEVICE)), DEVICE, scores, lengths, select)


@pytest.mark.parametrize("select", [1, 37, 80])
def test_rows_from_memory(select, monkeypatch):
    """Steps of 32, and short rows of 41 neighbouring keys, many of which equal the K-th."""
    monkeypatch.setattr(topk_kernels, "MAX_BLOCK", 16)
    monkeypatch.setattr(topk_kernels, "WALK_BLOCK", 32)
    odd = np.array(ODD_BITS, dtype=np.uint32)[:, None]
    noise = np.random.default_rng(select).integers(41, size=(len(odd), 100), dtype=np.uint32)
    lengths = [100 - row for row in range(len(odd) - 2)] + [select, select + 1]
    radix((odd + noise).view(np.float32), lengths, select)


def test_a_million_columns():
    width = 1 << 20
    scores = long_rows("normal", 1, width)
    radix(scores, [width], 100)
    radix(scores, [20000], 100)


def test_empty_shapes_are_legal():
    for impl in ("reference", "triton"):
        for rows, width in ((0, 5), (2, 0)):
            ids = torch.full((rows, 3), -77, dtype=torch.int32)
            topk(torch.zeros(rows, width), torch.zeros(rows, dtype=torch.int32), ids, impl=impl)
            assert (ids == -1).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"impl": "cuda"}, "impl must be"),
        ({"scores": torch.zeros(2, 4, dtype=torch.float64)}, "scores must be"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, "expected scores"),
        ({"ids": torch.zeros(2, 3, dtype=torch.int64)}, "ids must be"),
        ({"scores": torch.zeros(4, 2).T}, "stride 1"),
        ({"ids": torch.zeros(2, dtype=torch.int32)}, "expected scores"),
        ({"scores": torch.zeros(1, 1).expand(2, (1 << 20) + 1)}, "at most"),
    ],
)
def test_wrong_arguments_are_refused(change, said):
    args = {
        "scores": torch.zeros(2, 4),
        "lengths": torch.zeros(2, dtype=torch.int32),
        "ids": torch.zeros(2, 3, dtype=torch.int32),
        "impl": "reference",
    } | change
    with pytest.raises(ValueError, match=said):
        topk(args["scores"], args["lengths"], args["ids"], impl=args["impl"])
