"""The library's dense decode on a real GPU, against float64."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from plugins.flashmla.tests.page_cases import DIM, PAGE, PageCase, setup_of
from topkv.types import Tables
from topkv_flashmla import providers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
if torch.cuda.is_available():
    FOUND, TRIED = providers.BUILDS.first()
    pytestmark.append(pytest.mark.skipif(FOUND is None, reason="; ".join(TRIED)))

RAGGED = (0, 1, 63, 64, 65, 700, 0, 4097)


def backend(heads, lanes, most=1):
    from topkv_flashmla.backend import FlashMLA

    made = FlashMLA(setup_of(heads, lanes, "cuda", most))
    assert made.by_pages
    return made


def attend(case, made=None, pool=None):
    """Run a case and check it; ``pool`` stands for its pages where given."""
    lanes, most, heads, _ = case.q.shape
    made = made or backend(heads, lanes, most)
    q, pages, table, lengths = (x.cuda() for x in case.inputs)
    pages = pages if pool is None else pool
    out, lse = case.results("cuda")
    queries = None if case.queries is None else case.queries.cuda()
    made.attend(q, pages, pages, Tables(table, lengths, queries=queries), out, lse)
    case.check(out, lse)


def counts(lanes, most):
    """Queries of each lane: one, all, and between."""
    return tuple((1, most, max(1, most - 1), most, 2)[lane % 5] for lane in range(lanes))


@pytest.mark.parametrize("heads", [128, 100, 64, 16, 5, 1])
def test_ragged_lengths(heads):
    attend(PageCase.make(heads, RAGGED, width=80, pages=100))


@pytest.mark.parametrize("heads", [128, 100, 16, 5])
@pytest.mark.parametrize("most", [2, 4, 8])
def test_several_queries_of_ragged_lengths(heads, most):
    """Some requests have fewer tokens than queries, some end a page with one of them."""
    lengths = (*RAGGED, 3, 66, 130, 2)
    queries = counts(len(lengths), most)
    attend(PageCase.make(heads, lengths, width=80, pages=110, queries=queries, most=most))


@pytest.mark.parametrize("heads", [128, 16])
@pytest.mark.parametrize("queries", [4, 1])
def test_several_queries_of_one_long_lane(heads, queries):
    attend(PageCase.make(heads, (20001,), width=320, pages=330, queries=(queries,), most=4))


@pytest.mark.parametrize("heads", [128, 16])
def test_replays_follow_the_queries_of_lanes(heads):
    most, made = 4, backend(heads, 8, 4)
    steps = [(RAGGED, counts(8, most)), (RAGGED[::-1], (most,) * 8), ((65,) * 8, (1,) * 8)]
    cases = [
        PageCase.make(heads, lengths, 80, 100, seed, queries, most)
        for seed, (lengths, queries) in enumerate(steps)
    ]
    where = [x.cuda() for x in (*cases[0].inputs, cases[0].queries)]
    q, pool, table, lengths, queries = where
    tables = Tables(table, lengths, queries=queries)
    out, lse = cases[0].results("cuda")
    made.attend(q, pool, pool, tables, out, lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.attend(q, pool, pool, tables, out, lse)
    for case in cases:
        for target, values in zip(where, (*case.inputs, case.queries), strict=True):
            target.copy_(values)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        case.check(out, lse)


@pytest.mark.parametrize("lengths", [(0,), (0, 0, 0), (0, 65), (65, 0), (1,), (64,)])
def test_empty_lanes_anywhere(lengths):
    attend(PageCase.make(64, lengths, width=3, pages=4))


@pytest.mark.parametrize("heads", [128, 16])
def test_one_long_lane_is_split(heads):
    """20000 tokens are 313 pages, for 66 or 132 parts."""
    attend(PageCase.make(heads, (20000,), width=320, pages=330))


def test_more_lanes_than_parts():
    """Most are not split, and every fifth is empty."""
    lengths = tuple((97 * lane + 31) % 400 if lane % 5 else 0 for lane in range(200))
    attend(PageCase.make(16, lengths, width=7, pages=1400))


def test_pages_with_gaps_between():
    """A layer's pages within a pool of several: a page stride beyond 64 rows."""
    case = PageCase.make(16, RAGGED, width=80, pages=100)
    pool = torch.full((100, 3, 1, PAGE, DIM), torch.nan, dtype=torch.bfloat16, device="cuda")
    pool[:, 1] = case.pool.cuda()
    attend(case, pool=pool[:, 1])


def test_lanes_that_share_pages():
    case = PageCase.make(16, (130, 130), width=4, pages=8)
    case.table[1, :2] = case.table[0, :2]
    second = torch.cat([case.tokens[0][:128], case.tokens[1][128:]])
    attend(evolve(case, tokens=(case.tokens[0], second)))


def test_one_instance_follows_the_lengths():
    made = backend(16, 8)
    for seed, lengths in enumerate([RAGGED, RAGGED[::-1], (4097,), (0,) * 8, RAGGED]):
        attend(PageCase.make(16, lengths, width=80, pages=100, seed=seed), made)


@pytest.mark.parametrize("heads", [128, 16])
def test_replays_follow_lengths_and_tables(heads):
    """Lanes that are split in one replay are whole or empty in the next, and the other way."""
    made = backend(heads, 8)
    steps = [RAGGED, RAGGED[::-1], (0,) * 8, (65, 4097, 0, 0, 0, 0, 0, 1), RAGGED]
    cases = [PageCase.make(heads, step, 80, 100, seed) for seed, step in enumerate(steps)]
    where = [x.cuda() for x in cases[0].inputs]
    q, pool, table, lengths = where
    out, lse = cases[0].results("cuda")
    made.attend(q, pool, pool, Tables(table, lengths), out, lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.attend(q, pool, pool, Tables(table, lengths), out, lse)
    for case in cases:
        for target, values in zip(where, case.inputs, strict=True):
            target.copy_(values)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        case.check(out, lse)


def test_layers_of_one_graph():
    """Two layers in one graph, as an engine captures them: each call schedules for itself."""
    made = backend(64, 4)
    lengths = (700, 0, 65, 1)
    cases = [PageCase.make(64, lengths, width=12, pages=20, seed=seed) for seed in (0, 1)]
    layers = [([x.cuda() for x in case.inputs], case.results("cuda")) for case in cases]

    def forward():
        for (q, pool, table, counts), (out, lse) in layers:
            made.attend(q, pool, pool, Tables(table, counts), out, lse)

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    for _, (out, lse) in layers:
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
    graph.replay()
    for case, (_, (out, lse)) in zip(cases, layers, strict=True):
        case.check(out, lse)
