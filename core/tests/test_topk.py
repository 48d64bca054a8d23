"""Exact top-k: both implementations against a sort written here."""

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

from topkv.ops import topk_kernels  # noqa: E402
from topkv.ops.topk import topk  # noqa: E402

NEEDS_GPU = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
CASES = [
    ("reference", "cpu"),
    pytest.param("reference", "cuda", marks=[pytest.mark.gpu, NEEDS_GPU]),
    pytest.param("triton", "cuda", marks=[pytest.mark.gpu, NEEDS_GPU]),
]
if not CUDA:
    CASES.append(("triton", "cpu"))
SENTINEL = -77
INF, NAN = math.inf, math.nan
ODD = [0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, -1.1754944e-38, 1.0, -1.0, INF, -INF, NAN, 3.4e38]


def expected(row, length, select):
    """The definition, on Python floats: descending score, then ascending index."""
    keys = [-INF if math.isnan(x) else x for x in row[: max(length, 0)]]
    best = sorted(range(len(keys)), key=lambda i: (-keys[i], i))[:select]
    return sorted(best) + [-1] * (select - len(best))


def run(impl, device, scores, lengths, select):
    """ids as lists, from a poisoned result with a margin that must stay untouched."""
    rows = scores.shape[0]
    ids = torch.full((rows, select + 3), SENTINEL, dtype=torch.int32, device=device)
    lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
    topk(scores.to(device), lengths, ids[:, :select], impl=impl)
    assert (ids[:, select:] == SENTINEL).all(), "wrote behind its row"
    return ids[:, :select].tolist()


def check(impl, device, scores, lengths, select):
    got = run(impl, device, scores, lengths, select)
    for row, length, ids in zip(scores.tolist(), lengths, got, strict=True):
        assert ids == expected(row, length, select)


@pytest.mark.parametrize(("impl", "device"), CASES)
@given(st.data())
@settings(deadline=None, max_examples=60)
def test_any_values(impl, device, data):
    rows, width, select = (data.draw(st.integers(1, high)) for high in (3, 40, 45))
    value = st.one_of(st.sampled_from(ODD), st.floats(width=32))
    line = st.lists(value, min_size=width, max_size=width)
    scores = torch.tensor([data.draw(line) for _ in range(rows)], dtype=torch.float32)
    lengths = [data.draw(st.integers(0, width)) for _ in range(rows)]
    check(impl, device, scores, lengths, select)


@pytest.mark.parametrize(("impl", "device"), CASES)
@given(seed=st.integers(0, 999), values=st.integers(1, 4), select=st.integers(1, 300))
@settings(deadline=None, max_examples=25)
def test_masses_of_ties(impl, device, seed, values, select):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, values, (2, 700), generator=generator).float() - 1
    check(impl, device, scores, [700, 511], select)


@pytest.mark.parametrize(("impl", "device"), CASES)
@pytest.mark.parametrize("select", [1, 127, 512])
def test_every_length_near_its_edges(impl, device, select):
    lengths = [0, 1, select - 1, select, select + 1, 999, 1000]
    lengths = [length for length in lengths if length <= 1000]
    scores = torch.randn(len(lengths), 1000, generator=torch.Generator().manual_seed(select))
    for row, length in enumerate(lengths):
        scores[row, length:] = NAN if row % 2 else INF
    check(impl, device, scores, lengths, select)


@pytest.mark.parametrize(("impl", "device"), CASES)
@pytest.mark.parametrize("select", [1, 100, 1500])
def test_short_requests_in_wide_rows(impl, device, select):
    lengths = [0, 99, 1024, 1025, 2048, 2049, 8192, 8193, 8196]
    scores = torch.randn(len(lengths), 8196, generator=torch.Generator().manual_seed(select))
    scores[::2] = scores[::2].mul(3).round()
    for row, length in enumerate(lengths):
        scores[row, length:] = NAN if row % 2 else INF
    check(impl, device, scores, lengths, select)


@pytest.mark.parametrize(("impl", "device"), CASES)
def test_rows_may_be_strided_and_unaligned(impl, device):
    wide = torch.randn(4, 333, generator=torch.Generator().manual_seed(3)).to(device)
    ids = torch.full((4, 9), SENTINEL, dtype=torch.int32, device=device)
    lengths = torch.tensor([200, 3, 150, 0], dtype=torch.int32, device=device)
    topk(wide[:, 7:207], lengths, ids, impl=impl)
    for row, length, got in zip(
        wide[:, 7:207].tolist(), lengths.tolist(), ids.tolist(), strict=True
    ):
        assert got == expected(row, length, 9)


@pytest.mark.parametrize(("impl", "device"), CASES)
@pytest.mark.parametrize("width", [16384, 16385, 70000])
@pytest.mark.parametrize("select", [1, 2048, 9000])
def test_long_rows(impl, device, width, select):
    scores = torch.randn(2, width, generator=torch.Generator().manual_seed(width))
    scores[1] = scores[1].mul(3).round()
    check(impl, device, scores, [width, width - 17], select)


@pytest.mark.parametrize("select", [1, 37, 80])
@pytest.mark.parametrize(("impl", "device"), CASES)
def test_rows_from_memory(impl, device, select, monkeypatch):
    """In steps of 32, short rows of 41 neighbouring keys, of which many are the K-th."""
    monkeypatch.setattr(topk_kernels, "MAX_BLOCK", 16)
    monkeypatch.setattr(topk_kernels, "WALK_BLOCK", 32)
    generator = torch.Generator().manual_seed(select)
    first = torch.tensor(ODD).view(torch.int32)[:, None]
    bits = first + torch.randint(41, (len(ODD), 100), generator=generator)
    scores = bits.to(torch.int32).view(torch.float32)
    lengths = [100 - row for row in range(len(ODD) - 2)] + [select, select + 1]
    check(impl, device, scores, lengths, select)


@pytest.mark.parametrize(("impl", "device"), CASES)
def test_a_million_columns(impl, device):
    width = 1 << 20
    scores = torch.randn(1, width, generator=torch.Generator().manual_seed(1))
    check(impl, device, scores, [width], 100)
    check(impl, device, scores, [20000], 100)


@pytest.mark.parametrize(("impl", "device"), CASES)
@given(seed=st.integers(0, 999), small=st.integers(1, 60), more=st.integers(1, 60))
@settings(deadline=None, max_examples=20)
def test_budgets_are_nested(impl, device, seed, small, more):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 30, (1, 200), generator=generator).float()
    (inner,), (outer,) = (run(impl, device, scores, [190], k) for k in (small, small + more))
    assert set(inner) - {-1} <= set(outer)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize(("width", "select"), [(8192, 127), (131072, 2048), (40000, 9000)])
def test_graph_replay_follows_new_scores(width, select):
    scores = torch.randn(8, width, device="cuda")
    lengths = torch.full((8,), width, dtype=torch.int32, device="cuda")
    ids = torch.empty((8, select), dtype=torch.int32, device="cuda")
    topk(scores, lengths, ids, impl="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        topk(scores, lengths, ids, impl="triton")
    for _ in range(2):
        scores.normal_()
        lengths.random_(0, width)
        ids.fill_(SENTINEL)
        graph.replay()
        lines = zip(scores.tolist(), lengths.tolist(), ids.tolist(), strict=True)
        for row, length, got in lines:
            assert got == expected(row, length, select)


def test_empty_shapes_are_legal():
    for impl in ("reference", "triton"):
        assert run(impl, "cpu", torch.zeros(0, 5), [], 3) == []
        assert run(impl, "cpu", torch.zeros(2, 0), [0, 0], 3) == [[-1] * 3] * 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"impl": "cuda"}, "impl must be"),
        ({"scores": torch.zeros(2, 4, dtype=torch.float64)}, "scores must be"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, "same N"),
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
