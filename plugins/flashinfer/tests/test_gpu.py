"""The real library on a real GPU, against float64."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from topkv.hooks.backend import BackendSetup
from topkv.types import GroupShape, ModelShape, Tables
from topkv_flashinfer import providers
from topkv_flashinfer.backend import FlashInfer
from topkv_testing.backend.bench import columns_of, expect
from topkv_testing.backend.cases import AttendCase, by_lane
from topkv_testing.backend.plans import AdaptCase, StepInputs
from topkv_testing.backend.queries import with_queries
from topkv_testing.oracle import attention
from topkv_testing.strategies import Geometry

FOUND, TRIED = providers.PARTS["gqa"].first()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(FOUND is None, reason="; ".join(TRIED)),
]


def geometry(scope, unit, group=4, dim=128, dtype=torch.bfloat16, kv_heads=2):
    return Geometry(kv_heads, group, dim, unit, 1, scope, dtype)


def backend(g, batch, width, residency="sparse", most=1, **more):
    """An instance whose page tables have ``width`` columns, of a model with ``more``."""
    scale = more.pop("scale", g.dim**-0.5)
    model = ModelShape(1, g.kv_heads * g.group, g.kv_heads, g.dim, g.dtype, scale, **more)
    select = width - 1 if residency == "sparse" else 0
    group = GroupShape(
        *((0,), g.unit, g.lane_heads, g.kv_heads // g.lane_heads, g.dim, g.dtype, g.page_tokens),
        *(8, width, select, width, 2, residency),
    )
    sizes = (torch.device("cuda"), batch, model.group_size)
    return FlashInfer(BackendSetup(model, group, *sizes, max_queries=most)), model


def case(g, lengths, width, seed=0):
    """Inputs with ``width`` columns, and NaN and trash wherever no lane may look."""
    used = max(1, *(-(-length // g.unit) for length in lengths))
    return AttendCase(g, tuple(lengths), width - used, seed=seed)


def check(made, model, inputs):
    got = inputs.attend(made, torch.device("cuda"))
    inputs.expected(model.scale).check(*got, rounded_sums=True)


@pytest.mark.parametrize("scope", ["shared", "kv_head"])
@pytest.mark.parametrize("unit", [1, 16, 64])
def test_ragged_lanes_within_a_constant_plan(scope, unit):
    """Full, empty, one token, partly filled last units, and lanes that end inside a chunk."""
    g, width = geometry(scope, unit), 2048 // unit + 1
    made, model = backend(g, 8, width)
    ragged = [2048, 0, 1, unit + 1, 1000, 129, 2048 - 1, 127]
    few = [0, 1] if scope == "kv_head" else [1]
    for seed, lengths in enumerate((ragged, [2048] * 8, [0] * 8, few, ragged[::-1])):
        check(made, model, case(g, lengths, width, seed).make())


@pytest.mark.parametrize("scope", ["shared", "kv_head"])
@pytest.mark.parametrize("unit", [1, 16])
@pytest.mark.parametrize("most", [2, 8])
def test_several_queries_of_ragged_lanes(scope, unit, most):
    """Calls of one query in between; some lanes have fewer tokens than queries."""
    g, width = geometry(scope, unit), 2048 // unit + most
    batch = 8 // g.lane_heads
    made, model = backend(g, batch, width, most=most)
    ragged = [2048, 0, 1, unit + 1, 1000, 129, 2048 - 1, 3]
    counts = [1, most, 2, most, most - 1, most, 1, 2][:batch]
    for seed, lengths in enumerate((ragged, [2048] * 8, ragged[::-1])):
        inputs = case(g, lengths, width, seed).make()
        check(made, model, with_queries(inputs, counts, most))
        check(made, model, inputs)


def test_replays_follow_the_queries_of_rows():
    g, width, most = geometry("shared", 16), 130, 4
    made, model = backend(g, 4, width, most=most)
    first, then = (
        with_queries(case(g, lengths, width, seed).make(), counts, most)
        for seed, (lengths, counts) in enumerate(
            (([2048, 3, 0, 777], [4, 4, 1, 2]), ([1, 2048, 129, 64], [1, 3, 4, 4]))
        )
    )
    slots = max(len(inputs.pools[0]) for inputs in (first, then))
    pool = torch.zeros(slots, *first.pools[0].shape[1:], dtype=g.dtype, device="cuda")
    k, v = first.views([pool])
    q, table, lengths, queries = (
        x.cuda() for x in (first.q.nan_to_num(), first.table, first.lengths, first.queries)
    )
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")
    graph = torch.cuda.CUDAGraph()
    for inputs in (first, then, first):
        pool.fill_(torch.nan)
        pool[: len(inputs.pools[0])] = inputs.pools[0].cuda()
        for mine, fresh in (
            (q, inputs.q), (table, inputs.table), (lengths, inputs.lengths),
            (queries, inputs.queries),
        ):  # fmt: skip
            mine.copy_(fresh)
        tables = Tables(table, lengths, queries=queries)
        if inputs is first and not made._decode._plans:
            made.attend(q, k, v, tables, out, lse)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                made.attend(q, k, v, tables, out, lse)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        got = (each.flatten(0, 1).cpu() for each in (out, lse))
        inputs.expected(model.scale).check(*got, rounded_sums=True)


@pytest.mark.parametrize(
    ("group", "dim", "dtype"),
    [(7, 64, torch.float16), (1, 128, torch.bfloat16), (32, 128, torch.bfloat16)],
)
def test_other_heads_and_dtypes(group, dim, dtype):
    g = geometry("shared", 16, group, dim, dtype)
    made, model = backend(g, 3, 33)
    check(made, model, case(g, [512, 3, 0], 33).make())


@pytest.mark.parametrize(("softcap", "scale"), [(50.0, 0.0625), (50.0, 20.0), (0.5, 20.0)])
def test_capped_logits(softcap, scale):
    """Logits are capped in prompts and decode steps; dim 256 and 50 are Gemma 2's."""
    made, _ = backend(geometry("shared", 16, dim=256), 1, 33, scale=scale, softcap=softcap)
    draw = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(rows, heads, 256, generator=draw, device="cuda", dtype=torch.bfloat16)
        for rows, heads in ((37, 8), (500, 2), (500, 2))
    )
    for shift in (463, 200):
        out = torch.full((37, 8, 256), torch.nan, device="cuda")
        lse = torch.full((37, 8), torch.nan, device="cuda")
        made.prefill(q, k, v, shift, 0, out, lse)
        seen = torch.arange(500)[None] <= torch.arange(37)[:, None] + shift
        want, log = attention(q.cpu(), k.cpu(), v.cpu(), scale, seen, softcap)
        assert (out.cpu().double() - want).norm() <= 0.01 * want.norm()
        torch.testing.assert_close(lse.cpu().double(), log, rtol=5e-3, atol=5e-3)
    pools = [
        torch.nn.functional.pad(each, (0, 0, 0, 0, 0, 12))
        .view(32, 16, 2, 256)
        .transpose(1, 2)
        .contiguous()
        for each in (k, v)
    ]
    table = torch.nn.functional.pad(torch.arange(32), (0, 1)).int()[None].cuda()
    out = torch.full((1, 1, 8, 256), torch.nan, dtype=torch.bfloat16, device="cuda")
    lse = torch.full((1, 1, 8), torch.nan, device="cuda")
    lengths = torch.tensor([500], dtype=torch.int32, device="cuda")
    made.attend(q[:1][None], *pools, Tables(table, lengths), out, lse)
    want, log = attention(q[:1].cpu(), k.cpu(), v.cpu(), scale, softcap=softcap)
    assert (out[0].cpu().double() - want).norm() <= 0.01 * want.norm()
    torch.testing.assert_close(lse[0].cpu().double(), log, rtol=5e-3, atol=5e-3)


def test_dense_lanes_much_shorter_than_their_table():
    """Most chunks of the plan have no token."""
    g = geometry("shared", 64)
    made, model = backend(g, 4, 512, "resident")
    for seed, lengths in enumerate(([1, 0, 65, 300], [0, 0, 0, 0], [64 * 512, 1, 4000, 0])):
        check(made, model, case(g, lengths, 512, seed).make())


@pytest.mark.parametrize("scope", ["shared", "kv_head"])
def test_replays_follow_lengths_and_tables(scope):
    g, width = geometry(scope, 16), 129
    made, model = backend(g, 8, width)
    many, few = [2048, 3, 0, 777, 1, 2048, 16, 129], [0, 2048, 5, 0, 700, 1, 0, 17]
    steps = [
        case(g, sizes, width, seed).make()
        for seed, sizes in enumerate((many, few, [2048] * 8, [0] * 8, many[::-1]))
    ]
    first = steps[0]
    slots = max(inputs.pools[0].shape[0] for inputs in steps)
    shape = (slots, *first.pools[0].shape[1:])
    pool = torch.full(shape, torch.nan, dtype=g.dtype, device="cuda")
    k, v = first.views([pool])
    lanes, table, lengths = (x.cuda() for x in (first.q, first.table, first.lengths))
    q = lanes.view(8 // g.lane_heads, 1, -1, g.dim)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")

    def run():
        made.attend(q, k, v, Tables(table, lengths), out, lse)

    def replay(inputs, step):
        pool.fill_(torch.nan)
        pool[: inputs.pools[0].shape[0]] = inputs.pools[0].cuda()
        lanes.copy_(inputs.q)
        table.copy_(inputs.table)
        lengths.copy_(inputs.lengths)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        step()
        got = (by_lane(each, g.lane_heads).cpu() for each in (out, lse))
        inputs.expected(model.scale).check(*got, rounded_sums=True)

    replay(first, run)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for inputs in steps[1:] + steps[:1]:
        replay(inputs, graph.replay)


def test_an_adapted_table_is_attended_as_its_copy_is():
    """Pages are those written along with the table, or those that ``attend`` copies."""
    g = geometry("kv_head", 16)
    made, _ = backend(g, 4, 65)
    case = AdaptCase(g, ((3, 900), (-1, 0), (0, 7), (5, 30)), (64, 0, 5, 64) * 2, 64, 65, 2, 8)
    inputs = StepInputs.empty(made._decode._group, 4, "cuda")
    k, v = torch.randn(2, 8 * 2 * 67, 1, 16, 128, device="cuda").bfloat16()
    q = torch.randn(4, 1, 8, 128, device="cuda").bfloat16()
    table = torch.full((8, 65), -7, dtype=torch.int32, device="cuda")
    tables = Tables(table, torch.full((8,), -7, dtype=torch.int32, device="cuda"))
    found = []
    for seed in (0, 0, 1, 1):
        evolve(case, seed=seed).fill(inputs)
        made.adapt_page_table(inputs.view, inputs.plan, tables)
        assert tables.attached is made._decode.pages
        out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan).cuda()
        made.attend(q, k, v, tables, out, lse)
        others = torch.full_like(q, torch.nan), torch.full_like(lse, torch.nan)
        made.attend(q, k, v, evolve(tables, attached=None), *others)
        assert torch.equal(out, others[0])
        assert torch.equal(lse, others[1])
        found.append(out)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


def test_a_capture_must_not_be_the_first_to_see_a_batch():
    g = geometry("shared", 16)
    made, _ = backend(g, 4, 9)
    inputs = case(g, [30, 4], 9).make()
    k, v = (x.cuda() for x in inputs.views())
    q, table, lengths = (x.cuda() for x in (inputs.q, inputs.table, inputs.lengths))
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")
    made._decode._plans.pop((2, 9), None)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="2 lanes with page tables of 9 columns"):  # noqa: SIM117
        with torch.cuda.graph(graph):
            made.attend(q, k, v, Tables(table, lengths), out, lse)


@pytest.mark.parametrize("selected", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts(selected, dtype):
    """Results are in rows of more elements than the heads have."""
    g = geometry("shared", 16)
    made, model = backend(g, 1, 9)
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(70, 8, 128, generator=generator).bfloat16()
    k, v = torch.randn(2, 200, 2, 128, generator=generator).bfloat16()
    keep = torch.rand(70, 200, generator=generator) < 0.3
    keep[4] = False
    keep[:, 64:128] = False  # a tile that nobody sees
    for q_start, k_start in ((130, 0), (200, 0), (50, 40), (10, 50), (0, 300)):
        rows, columns = q_start + torch.arange(70), k_start + torch.arange(200)
        mask = columns[None] <= rows[:, None]
        mask = mask & keep if selected else mask
        wanted = expect(q, k, v, model.scale, mask)
        wide = torch.full((70, 8 * 128 + 8), torch.nan, dtype=dtype, device="cuda")
        out = wide[:, :-8].unflatten(1, (8, 128))
        lse = torch.full((70, 8), torch.nan, device="cuda")
        what = (q.cuda(), k.cuda(), v.cuda(), q_start, k_start)
        if selected:
            made.prefill_selected(*what, columns_of(keep).cuda(), out, lse)
        else:
            made.prefill(*what, out, lse)
        wanted.check(out.cpu(), lse.cpu(), rounded_sums=True)
