"""Latent attention by the real library on a Hopper GPU, against float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from topkv.hooks.backend import BackendSetup
from topkv.types import GroupShape, ModelShape, Tables, newest_units
from topkv_flashinfer import providers
from topkv_flashinfer.backend import FlashInfer
from topkv_testing.backend.bench import columns_of, expect
from topkv_testing.oracle import attention
from topkv_testing.tolerance import assert_as_good

FOUND, TRIED = providers.PARTS["mla"].first()
CUDA = torch.cuda.is_available()
HOPPER = CUDA and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a CUDA device of capability 9"),
    pytest.mark.skipif(FOUND is None, reason="; ".join(TRIED)),
]

SCALE = 576**-0.5


def backend(heads, select, unit=1, lanes=4, dtype=torch.bfloat16, most=1):
    model = ModelShape(1, heads, 1, 576, dtype, SCALE, "mla", 512)
    group = GroupShape(
        *((0,), unit, 1, 1, 576, dtype, 64, lanes, 4096, select, 2 * select, 32), planes=1
    )
    sizes = (torch.device("cuda"), lanes, heads)
    return FlashInfer(BackendSetup(model, group, *sizes, max_queries=most)), group


def case(heads, group, lengths, seed=0, most=1):
    """Slots of random rows, NaN where nothing is listed; a table in random order, trash behind."""
    generator = torch.Generator().manual_seed(seed)
    slots = len(lengths) * group.slots
    rows = torch.full((slots, 1, group.unit, 576), torch.nan).to(group.dtype)
    columns = group.select + newest_units(most, group.unit)
    table = torch.full((len(lengths), columns), -(2**31), dtype=torch.int32)
    lists = []
    for lane, length in enumerate(lengths):
        units = -(-length // group.unit)
        order = torch.randperm(group.slots, generator=generator)[:units] + lane * group.slots
        table[lane, :units] = order.int()
        tokens = torch.arange(length)
        mine = torch.randn(length, 576, generator=generator).to(group.dtype)
        rows[order[tokens // group.unit], 0, tokens % group.unit] = mine
        lists.append(mine[:, None])
    q = torch.randn(len(lengths), most, heads, 576, generator=generator).to(group.dtype)
    return q, rows, table, lists


def check(q, lists, out, lse, queries=None):
    out, lse = out.cpu(), lse.cpu()
    for lane, nth in product(range(len(lists)), range(q.shape[1])):
        count, here = queries[lane] if queries else 1, slice(nth, nth + 1)
        rows = lists[lane]
        rows = rows[: max(len(rows) - (count - 1 - nth), 0) if nth < count else 0]
        if not len(rows):
            assert (out[lane, nth] == 0).all()
            assert (lse[lane, nth] == -torch.inf).all()
            continue
        want, log = attention(q[lane, here], rows, rows[..., :512], SCALE)
        rough, what = expect(q[lane, here], rows, rows[..., :512], SCALE), f"lane {lane}, {nth}"
        assert_as_good(out[lane, here], want, rough.rough_out, what, 2 * rough.drift)
        torch.testing.assert_close(lse[lane, here].double(), log, rtol=1e-5, atol=1e-4)


def poisoned(q):
    out = torch.full((*q.shape[:3], 512), torch.nan, dtype=q.dtype, device="cuda")
    return out, torch.full(q.shape[:3], torch.nan, device="cuda")


@pytest.mark.parametrize("heads", [128, 64, 16, 5])
@pytest.mark.parametrize("unit", [1, 16])
def test_ragged_lanes_within_a_constant_plan(heads, unit):
    made, group = backend(heads, 2048 // unit, unit)
    for seed, lengths in enumerate(
        ([2048, 1, 0, 1000], [2048] * 4, [0] * 4, [1], [33, 2047], [64, 65, 63, 32])
    ):
        q, rows, table, lists = case(heads, group, lengths, seed)
        out, lse = poisoned(q)
        sizes = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        tables = Tables(table.cuda(), sizes)
        made.attend(q.cuda(), rows.cuda(), rows.cuda(), tables, out, lse)
        check(q, lists, out, lse)


@pytest.mark.parametrize("heads", [128, 16])
@pytest.mark.parametrize("unit", [1, 16])
@pytest.mark.parametrize("most", [2, 8])
def test_several_queries_of_ragged_lanes(heads, unit, most):
    """Captured: other numbers of queries in the replay; padding is NaN."""
    made, group = backend(heads, 512 // unit, unit, most=most)
    lengths, queries = [512, 3, 0, 400], [1, most, 2, most]
    q, rows, table, lists = case(heads, group, lengths, most=most)
    for lane, count in enumerate(queries):
        q[lane, count:] = torch.nan
    where = [x.cuda() for x in (q, rows, table, torch.tensor(lengths, dtype=torch.int32))]
    numbers = torch.tensor(queries, dtype=torch.int32, device="cuda")
    out, lse = poisoned(q)
    tables = Tables(where[2], where[3], queries=numbers)

    def run():
        made.attend(where[0], where[1], where[1], tables, out, lse)

    run()
    check(q.nan_to_num(), lists, out, lse, queries)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    where[0].copy_(q.nan_to_num())
    for counts in ([most] * 4, queries):
        numbers.copy_(torch.tensor(counts))
        graph.replay()
        check(q.nan_to_num(), lists, out, lse, counts)


def test_rows_that_lie_apart():
    """Rows are of a fused projection; nothing is written between them."""
    made, group = backend(16, 512)
    lengths = [512, 1, 0, 100]
    q, rows, table, lists = case(16, group, lengths)
    wide = torch.full((4, 1, 19, 576), torch.nan, dtype=q.dtype, device="cuda")
    wide[:, :, :16] = q.cuda()
    results = torch.full((4, 1, 19, 512), -77.0, dtype=q.dtype, device="cuda")
    out, lse = results[:, :, :16], torch.full((4, 1, 16), torch.nan, device="cuda")
    tables = Tables(table.cuda(), torch.tensor(lengths, dtype=torch.int32, device="cuda"))
    made.attend(wide[:, :, :16], rows.cuda(), rows.cuda(), tables, out, lse)
    check(q, lists, out, lse)
    assert (results[:, :, 16:] == -77).all()


@pytest.mark.parametrize("select", [40, 512])
def test_replays_follow_lengths_and_tables(select):
    made, group = backend(128, select, lanes=6)
    many, few = [select, 3, 0, 37, 1, select], [9, 0, select, 31, 33, 2]
    q, rows, table, _ = case(128, group, many)
    where = [x.cuda() for x in (q, rows, table, torch.tensor(many, dtype=torch.int32))]
    out, lse = poisoned(q)

    def run():
        made.attend(where[0], where[1], where[1], Tables(where[2], where[3]), out, lse)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed, lengths in enumerate((few, many, [select] * 6, [0] * 6, few[::-1])):
        q, rows, table, lists = case(128, group, lengths, seed + 1)
        sizes = torch.tensor(lengths, dtype=torch.int32)
        for target, values in zip(where, (q, rows, table, sizes), strict=True):
            target.copy_(values)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        check(q, lists, out, lse)


@pytest.mark.parametrize("heads", [128, 7])
@pytest.mark.parametrize("selected", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts(heads, selected, dtype):
    """Results are in rows of more elements than the heads have."""
    made, _ = backend(heads, 512)
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(70, heads, 576, generator=generator).bfloat16()
    k = torch.randn(200, 1, 576, generator=generator).bfloat16()
    keep = torch.rand(70, 200, generator=generator) < 0.3
    keep[4] = False
    for q_start, k_start in ((130, 0), (200, 0), (50, 40), (0, 300)):
        rows, columns = q_start + torch.arange(70), k_start + torch.arange(200)
        mask = columns[None] <= rows[:, None]
        mask = mask & keep if selected else mask
        wanted = expect(q, k, k[..., :512], SCALE, mask)
        wide = torch.full((70, heads * 512 + 8), torch.nan, dtype=dtype, device="cuda")
        out = wide[:, :-8].unflatten(1, (heads, 512))
        lse = torch.full((70, heads), torch.nan, device="cuda")
        what = (q.cuda(), k.cuda(), k[..., :512].cuda(), q_start, k_start)
        if selected:
            made.prefill_selected(*what, columns_of(keep).cuda(), out, lse)
        else:
            made.prefill(*what, out, lse)
        wanted.check(out.cpu(), lse.cpu())
