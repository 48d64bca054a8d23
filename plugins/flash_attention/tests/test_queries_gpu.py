"""Several queries a row by the real libraries on a real GPU, against float64."""

from __future__ import annotations

import pytest
import torch

from plugins.flash_attention.tests.gpu_cases import (
    EACH,
    MARKS,
    check_latent,
    counts,
    grouped,
    latent,
    latent_case,
    ragged,
    results,
)
from topkv.types import Tables
from topkv_flash_attention import backend as module
from topkv_testing.backend.cases import AttendCase, by_lane
from topkv_testing.backend.queries import with_queries
from topkv_testing.strategies import Geometry

pytestmark = MARKS


@EACH
@pytest.mark.parametrize("scope", ["shared", "kv_head"])
@pytest.mark.parametrize("unit", [1, 16, 64, 80, 128])
@pytest.mark.parametrize(("dim", "group"), [(64, 8), (128, 1), (128, 4), (128, 32), (256, 8)])
@pytest.mark.parametrize("most", [2, 8])
def test_several_queries_over_scattered_units(place, scope, unit, dim, group, most):
    """Padding and unlisted units are NaN; some lanes have fewer tokens than queries."""
    geometry = Geometry(2, group, dim, unit, 1, scope, torch.bfloat16)
    batch = 8 // geometry.lane_heads
    instance, model = grouped(place, geometry, batch, most)
    for layout in ("buffer", "pages"):
        case = AttendCase(geometry, ragged(unit, 8), spare=5, layout=layout)
        inputs = with_queries(case.make(), counts(batch, most), most)
        inputs.expected(model.scale).check(*inputs.attend(instance, "cuda"))


@EACH
@pytest.mark.parametrize("lanes", [1, 300, 1100])
def test_several_queries_in_any_batch(place, lanes):
    geometry = Geometry(1, 4, 128, 16, 1, "shared", torch.bfloat16)
    instance, model = grouped(place, geometry, lanes, 3)
    case = AttendCase(geometry, tuple((97 * n + 31) % 90 for n in range(lanes)), 40)
    inputs = with_queries(case.make(), counts(lanes, 3), 3)
    inputs.expected(model.scale).check(*inputs.attend(instance, "cuda"))


@EACH
@pytest.mark.parametrize("share", [1, 3 << 18, 1 << 30])
def test_parts_of_several_queries_are_merged(place, share, monkeypatch):
    """Each lane has parts of its own: one, up to 32, as the library likes."""
    monkeypatch.setattr(module, "ACCUMULATORS", share)
    geometry = Geometry(2, 4, 128, 16, 1, "shared", torch.bfloat16)
    instance, model = grouped(place, geometry, 3, 3)
    inputs = with_queries(AttendCase(geometry, (5000, 77, 3000)).make(), [3, 2, 1], 3)
    inputs.expected(model.scale).check(*inputs.attend(instance, "cuda"))


@EACH
@pytest.mark.parametrize("scope", ["shared", "kv_head"])
def test_replays_follow_the_queries_of_rows(place, scope):
    geometry, most = Geometry(2, 4, 128, 16, 1, scope, torch.bfloat16), 4
    batch = 8 // geometry.lane_heads
    instance, model = grouped(place, geometry, batch, most)
    cases = [
        with_queries(AttendCase(geometry, lengths, seed=seed).make(), some, most)
        for seed, (lengths, some) in enumerate(
            (
                (ragged(16, 8), counts(batch, most)),
                (ragged(16, 8)[::-1], [most] * batch),
                ((9,) * 8, [1] * batch),
            )
        )
    ]
    first = cases[0]
    pools = [
        torch.full((600, *pool.shape[1:]), torch.nan, dtype=pool.dtype, device="cuda")
        for pool in first.pools
    ]
    k, v = first.views(pools)
    table = torch.full((8, 200), -1, dtype=torch.int32, device="cuda")
    tables = Tables(table, first.lengths.cuda(), queries=first.queries.cuda())
    heads = 2 * geometry.group
    q = torch.zeros(batch, most, heads, 128, dtype=torch.bfloat16, device="cuda")
    out, lse = results(batch, heads, 128, most=most)

    def fill(case):
        for mine, fresh in zip(pools, case.pools, strict=True):
            mine[: len(fresh)].copy_(fresh)
        table[:, : case.table.shape[1]].copy_(case.table)
        tables.lengths.copy_(case.lengths)
        tables.queries.copy_(case.queries)
        rows = case.q.unflatten(0, (-1, geometry.lane_heads)).transpose(1, 2).flatten(2, 3)
        q.copy_(rows)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)

    fill(first)
    instance.attend(q, k, v, tables, out, lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        instance.attend(q, k, v, tables, out, lse)
    for case in (*cases, first):
        fill(case)
        graph.replay()
        got = (by_lane(each, geometry.lane_heads).cpu() for each in (out, lse))
        case.expected(model.scale).check(*got)


@EACH
@pytest.mark.parametrize("heads", [128, 16, 5])
@pytest.mark.parametrize("unit", [1, 16, 64])
@pytest.mark.parametrize("most", [2, 8])
def test_several_latent_queries_over_scattered_rows(place, heads, unit, most):
    lengths, some = (2048, 1, 0, 1000), counts(4, most)
    instance = latent(place, heads, unit, most=most)
    q, stored, table = latent_case(heads, unit, lengths, most=most)
    for lane, count in enumerate(some):
        q[lane, count:] = torch.nan
    out, lse = results(4, heads, 512, most=most)
    where, numbers = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (lengths, some))
    rows, tables = stored.cuda(), Tables(table.cuda(), where, queries=numbers)
    instance.attend(q.cuda(), rows, rows, tables, out, lse)
    check_latent(q, stored, table, lengths, unit, out, lse, some)
