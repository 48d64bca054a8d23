"""The real library on a real GPU, against float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from attrs import evolve

from topkv.hooks.backend import BackendSetup
from topkv.types import GroupShape, ModelShape, Tables, newest_units
from topkv_authoring.latent_fp8 import decode_fp8, encode_fp8
from topkv_flashmla import providers
from topkv_testing.backend.bench import columns_of
from topkv_testing.backend.plans import StepInputs
from topkv_testing.oracle import attention
from topkv_testing.tolerance import assert_as_good

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
if torch.cuda.is_available():
    FOUND, TRIED = providers.BUILDS.first()
    pytestmark.append(pytest.mark.skipif(FOUND is None, reason="; ".join(TRIED)))

SCALE = 576**-0.5


def backend(heads, kv_format, select, unit=1, lanes=4, most=1):
    from topkv_flashmla.backend import FlashMLA

    model = ModelShape(1, heads, 1, 576, torch.bfloat16, SCALE, "mla", 512)
    dim, dtype = (656, torch.uint8) if kv_format == "fp8" else (576, torch.bfloat16)
    group = GroupShape(
        *((0,), unit, 1, 1, dim, dtype, 64, lanes, 4096, select, 2 * select, 32), planes=1
    )
    sizes = (torch.device("cuda"), lanes, heads)
    return FlashMLA(BackendSetup(model, group, *sizes, max_queries=most)), group


def case(heads, kv_format, group, lengths, seed=0, most=1):
    """Slots of random rows, NaN where nothing is listed; a table in random order."""
    generator = torch.Generator().manual_seed(seed)
    slots = len(lengths) * group.slots
    rows = torch.randn(slots, 1, group.unit, 576, generator=generator).to(torch.bfloat16)
    stored = encode_fp8(rows) if kv_format == "fp8" else rows.clone()
    true = decode_fp8(stored, torch.float64) if kv_format == "fp8" else rows.double()
    columns = group.select + newest_units(most, group.unit)
    table = torch.zeros(len(lengths), columns, dtype=torch.int32)
    used = torch.zeros(slots, dtype=torch.bool)
    for lane, length in enumerate(lengths):
        units = -(-length // group.unit)
        order = torch.randperm(group.slots, generator=generator)[:units] + lane * group.slots
        table[lane, :units] = order.int()
        used[order] = True
    stored[~used] = 0xFF if kv_format == "fp8" else torch.nan
    q = torch.randn(len(lengths), most, heads, 576, generator=generator).to(torch.bfloat16)
    return q, stored, true, table


def run(made, q, stored, table, lengths, out, lse, queries=None):
    made.attend(q, stored, stored, Tables(table, lengths, queries=queries), out, lse)


def poisoned(lanes, heads, most=1):
    shape = (lanes, most, heads, 512)
    out = torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda")
    return out, torch.full(shape[:3], torch.nan, device="cuda")


def rough(q, rows):
    """Attention as it is with bfloat16 weights and values."""
    rows = rows[:, 0].bfloat16().float()
    weights = (q[0].float() @ rows.T * SCALE).softmax(-1).bfloat16().float()
    return (weights @ rows[:, :512])[None].bfloat16()


def check(q, true, table, lengths, unit, out, lse, queries=None):
    for lane, nth in product(range(len(lengths)), range(q.shape[1])):
        count, here = queries[lane] if queries else 1, slice(nth, nth + 1)
        length = lengths[lane] - (count - 1 - nth) if nth < count else 0
        if length <= 0:
            assert (out[lane, nth] == 0).all()
            assert (lse[lane, nth] == -torch.inf).all()
            continue
        units = table[lane, : -(-length // unit)].long()
        rows = true[units].transpose(1, 2).flatten(0, 1)[:length]
        query = q[lane, here]
        want, log = attention(query.double(), rows, rows[..., :512], SCALE)
        what = f"lane {lane}, query {nth}"
        assert_as_good(out[lane, here].cpu(), want, rough(query, rows), what=what)
        torch.testing.assert_close(lse[lane, here].cpu().double(), log, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("kv_format", ["fp8", "model"])
@pytest.mark.parametrize("heads", [128, 64, 16, 5])
@pytest.mark.parametrize("unit", [1, 16])
def test_decode_over_scattered_rows(kv_format, heads, unit):
    made, group = backend(heads, kv_format, 2048 // unit, unit)
    lengths = [2048, 1, 0, 1000]
    q, stored, true, table = case(heads, kv_format, group, lengths)
    out, lse = poisoned(4, heads)
    run(
        *(made, q.cuda(), stored.cuda(), table.cuda()),
        *(torch.tensor(lengths, dtype=torch.int32, device="cuda"), out, lse),
    )
    check(q, true, table, lengths, unit, out, lse)


@pytest.mark.parametrize("kv_format", ["fp8", "model"])
@pytest.mark.parametrize("heads", [128, 64, 5])
@pytest.mark.parametrize("unit", [1, 16])
@pytest.mark.parametrize("most", [2, 8])
def test_several_queries_over_scattered_rows(kv_format, heads, unit, most):
    """One instance for calls of one query and of several; a lane has fewer tokens than queries."""
    made, group = backend(heads, kv_format, 512 // unit, unit, most=most)
    lengths, queries = [512, 3, 0, 400], [1, most, 2, most - 1]
    q, stored, true, table = case(heads, kv_format, group, lengths, most=most)
    for lane, count in enumerate(queries):
        q[lane, count:] = torch.nan
    where = [x.cuda() for x in (q, stored, table, torch.tensor(lengths, dtype=torch.int32))]
    numbers = torch.tensor(queries, dtype=torch.int32, device="cuda")
    single, log = poisoned(4, heads)  # as many queries as two rows with two of them have
    alone = [where[0][:, :1].contiguous(), where[1], where[2][:, : group.select + 1], where[3]]
    run(made, *alone, single, log)
    check(q[:, :1], true, table, lengths, unit, single, log)
    two = [x if at == 1 else x[:2] for at, x in enumerate(where)]
    out, lse = poisoned(2, heads, most)
    run(made, *two, out, lse, numbers[:2])
    check(q[:2].nan_to_num(), true, table, lengths[:2], unit, out, lse, queries)
    out, lse = poisoned(4, heads, most)
    run(made, *where, out, lse, numbers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(made, *where, out, lse, numbers)
    where[0].copy_(q.nan_to_num())
    for counts in (queries, [most, 1, 1, 1]):
        numbers.copy_(torch.tensor(counts))
        graph.replay()
        check(q.nan_to_num(), true, table, lengths, unit, out, lse, counts)


@pytest.mark.parametrize("kv_format", ["fp8", "model"])
@pytest.mark.parametrize("heads", [128, 16])
def test_rows_that_lie_apart(kv_format, heads):
    """Rows are of a fused projection; nothing is written between them."""
    made, group = backend(heads, kv_format, 512)
    lengths = [512, 1, 0, 100]
    q, stored, true, table = case(heads, kv_format, group, lengths)
    wide = torch.full((4, 1, heads + 3, 576), torch.nan, dtype=q.dtype, device="cuda")
    wide[:, :, :heads] = q.cuda()
    results = torch.full((4, 1, heads + 3, 512), -77.0, dtype=q.dtype, device="cuda")
    out, lse = results[:, :, :heads], poisoned(4, heads)[1]
    run(
        *(made, wide[:, :, :heads], stored.cuda(), table.cuda()),
        *(torch.tensor(lengths, dtype=torch.int32, device="cuda"), out, lse),
    )
    check(q, true, table, lengths, 1, out, lse)
    assert (results[:, :, heads:] == -77).all()


@pytest.mark.parametrize("rows", [3_400_000, 3_400_001])
def test_rows_of_more_bytes_than_a_stride_of_the_library_holds(rows):
    """The rows listed are the last ones; pages are of 64 rows, and of one."""
    made, group = backend(64, "fp8", 512)
    lengths = [512, 1, 0, 100]
    q, stored, true, table = case(64, "fp8", group, lengths)
    many = torch.full((rows, *stored.shape[1:]), 0xFF, dtype=stored.dtype, device="cuda")
    many[rows - len(stored) :] = stored.cuda()
    out, lse = poisoned(4, 64)
    run(
        *(made, q.cuda(), many, (table + rows - len(stored)).cuda()),
        *(torch.tensor(lengths, dtype=torch.int32, device="cuda"), out, lse),
    )
    check(q, true, table, lengths, 1, out, lse)


@pytest.mark.parametrize("kv_format", ["fp8", "model"])
def test_replays_follow_lengths_and_tables(kv_format):
    made, group = backend(128, kv_format, 512)
    first, then = [512, 3, 0, 77], [9, 0, 512, 300]
    q, stored, true, table = (x for x in case(128, kv_format, group, first))
    where = [x.cuda() for x in (q, stored, table, torch.tensor(first, dtype=torch.int32))]
    out, lse = poisoned(4, 128)
    run(made, *where, out, lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(made, *where, out, lse)
    for lengths, seed in ((first, 0), (then, 5)):
        q, stored, true, table = case(128, kv_format, group, lengths, seed)
        for target, values in zip(
            where, (q, stored, table, torch.tensor(lengths, dtype=torch.int32)), strict=True
        ):
            target.copy_(values)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        check(q, true, table, lengths, 1, out, lse)


@pytest.mark.parametrize("kv_format", ["fp8", "model"])
def test_lanes_that_are_not_split(kv_format):
    """The library merges nothing then: kernels behind it must still run behind all of it."""
    made, group = backend(128, kv_format, 63, lanes=140)
    lengths = [64, 1, 0, 33] * 35
    q, stored, true, table = case(128, kv_format, group, lengths)
    where = [x.cuda() for x in (q, stored, table, torch.tensor(lengths, dtype=torch.int32))]
    out, lse = poisoned(140, 128)
    run(made, *where, out, lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(made, *where, out, lse)
    check(q, true, table, lengths, 1, out, lse)
    first = out.clone(), lse.clone()
    for _ in range(50):
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, first[0])
        assert torch.equal(lse, first[1])


@pytest.mark.parametrize("heads", [128, 7])
@pytest.mark.parametrize("selected", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts(heads, selected, dtype):
    """Results are in rows of more elements than the heads have."""
    made, _ = backend(heads, "model", 512)
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(70, heads, 576, generator=generator).to(torch.bfloat16)
    k = torch.randn(200, 1, 576, generator=generator).to(torch.bfloat16)
    keep = torch.rand(70, 200, generator=generator) < 0.3
    keep[4] = False
    for q_start, k_start in ((130, 0), (200, 0), (50, 40)):
        rows, columns = q_start + torch.arange(70), k_start + torch.arange(200)
        mask = columns[None] <= rows[:, None]
        mask = mask & keep if selected else mask
        want, log = attention(q, k, k[..., :512], SCALE, mask)
        wide = torch.full((70, heads * 512 + 8), torch.nan, dtype=dtype, device="cuda")
        out = wide[:, :-8].unflatten(1, (heads, 512))
        lse = torch.full((70, heads), torch.nan, device="cuda")
        what = (q.cuda(), k.cuda(), k[..., :512].cuda(), q_start, k_start)
        if selected:
            made.prefill_selected(*what, columns_of(keep).cuda(), out, lse)
        else:
            made.prefill(*what, out, lse)
        seen = mask.any(1)
        torch.testing.assert_close(out.cpu()[seen].double(), want[seen], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse.cpu()[seen].double(), log[seen], rtol=1e-3, atol=2e-3)
        assert (out.cpu()[~seen] == 0).all()
        assert (lse.cpu()[~seen] == -torch.inf).all()


@pytest.mark.parametrize("kv_format", ["fp8", "model"])
def test_a_graph_without_its_adapt_copies_the_table(kv_format):
    """The graph replays after other tables were adapted."""
    made, group = backend(64, kv_format, 96)
    rows = torch.randn(4 * group.slots, 1, 1, 576).bfloat16()
    stored = (encode_fp8(rows) if kv_format == "fp8" else rows).cuda()
    q = torch.randn(4, 1, 64, 576).bfloat16().cuda()
    inputs, tables = StepInputs.empty(group, 4, "cuda"), []
    inputs.view.step.slots.copy_(torch.arange(4))
    inputs.view.step.lengths.fill_(900)
    inputs.plan.count.fill_(96)
    mine, others = poisoned(4, 64), poisoned(4, 64)
    for _ in range(2):
        inputs.plan.slots.copy_(torch.stack([torch.randperm(192)[:96] for _ in range(4)]))
        table = torch.full((4, 97), -7, dtype=torch.int32, device="cuda")
        tables.append(Tables(table, torch.full((4,), -7, dtype=torch.int32, device="cuda")))
        made.adapt_page_table(inputs.view, inputs.plan, tables[-1])
        if len(tables) == 1:
            made.attend(q, stored, stored, tables[0], *others)
            bare = evolve(tables[0], attached=None)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                made.attend(q, stored, stored, bare, *mine)
    graph.replay()
    for got, expected in zip(mine, others, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("kv_format", ["fp8", "model"])
def test_an_adapted_table_is_attended_as_its_copy_is(kv_format, tail):
    """Indices are those written along with the table, or those that ``attend`` makes."""
    made, group = backend(128, kv_format, 96)
    generator = torch.Generator().manual_seed(0)
    stored = torch.randn(4 * group.slots, 1, 1, 576, generator=generator).bfloat16()
    stored = (encode_fp8(stored) if kv_format == "fp8" else stored).cuda()
    q = torch.randn(4, 1, 128, 576, generator=generator).bfloat16().cuda()
    inputs = StepInputs.empty(group, 4, "cuda")
    for seed in range(3):
        rows = torch.randperm(4, generator=torch.Generator().manual_seed(seed)).tolist()
        requests = [(rows[0], 900), (-1, 0), (rows[1], 7), (rows[2], 3000)]
        inputs.view.step.slots.copy_(torch.tensor([slot for slot, _ in requests]))
        inputs.view.step.lengths.copy_(torch.tensor([length for _, length in requests]))
        inputs.plan.slots.copy_(torch.stack([torch.randperm(group.slots)[:96] for _ in range(4)]))
        inputs.plan.count.copy_(torch.tensor([96, 5, 6, 40]) - seed)
        table = torch.full((4, 96 + tail), -7, dtype=torch.int32, device="cuda")
        tables = Tables(table, torch.full((4,), -7, dtype=torch.int32, device="cuda"))
        made.adapt_page_table(inputs.view, inputs.plan, tables)
        assert tables.attached is not None
        mine, others = poisoned(4, 128), poisoned(4, 128)
        made.attend(q, stored, stored, tables, *mine)
        made.attend(q, stored, stored, evolve(tables, attached=None), *others)
        for got, expected in zip(mine, others, strict=True):
            assert torch.equal(got, expected)
