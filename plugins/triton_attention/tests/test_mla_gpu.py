"""Latent attention at its real size on a device: graphs, wide addresses, host memory."""

from __future__ import annotations

import math

import pytest
import torch
from attrs import evolve

from plugins.triton_attention.tests.latent_cases import LatentCase
from topkv.types import Tables
from topkv_testing.backend.bench import columns_of, expect

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
MODEL = LatentCase("model", torch.bfloat16, 128, 512, 64, 1, (2048, 0, 1, 700), 3)
FP8 = evolve(MODEL, kv_format="fp8")
both_formats = pytest.mark.parametrize("case", [MODEL, FP8], ids=["model", "fp8"])


@both_formats
@pytest.mark.parametrize("heads", [16, 40, 64, 128])
@pytest.mark.parametrize("unit", [1, 64])
def test_real_sizes(case, heads, unit):
    case = evolve(case, heads=heads, unit=unit)
    case.check(case.backend("triton", CUDA), CUDA)


@both_formats
@pytest.mark.parametrize("heads", [16, 40, 128])
@pytest.mark.parametrize("most", [2, 4, 8])
def test_several_queries_at_real_sizes(case, heads, most):
    """Splits, and blocks of heads that belong to two queries."""
    counts = tuple((3 * lane + 1) % most + 1 for lane in range(4))
    case = evolve(case, heads=heads, lengths=(2048, 0, 5, 700), queries=counts, most=most)
    case.check(case.backend("triton", CUDA), CUDA)


@both_formats
@pytest.mark.parametrize("lanes", [1, 33, 130])
def test_any_batch(case, lanes):
    """Batches have many splits, few, or none."""
    lengths = tuple((97 * lane + 31) % 400 for lane in range(lanes))
    case = evolve(case, heads=64, lengths=lengths)
    case.check(case.backend("triton", CUDA), CUDA)


@both_formats
def test_addresses_beyond_2_31_bytes_and_elements(case):
    case = evolve(case, heads=16, lengths=(130, 20))
    inputs = case.make()
    few, _, unit, row = inputs.pool.shape
    slots = 2**31 // row + few
    wide = torch.empty(slots, 1, unit, row, dtype=inputs.pool.dtype, device=CUDA)
    assert wide.numel() > 2**31
    wide.view(torch.uint8).fill_(0xFF)
    wide[-few:] = inputs.pool[:, 1:2].to(CUDA)
    table = torch.where(inputs.table.clamp(0, few - 1) == inputs.table, inputs.table, 0)
    table = (table + slots - few).int().to(CUDA)
    out = torch.full((2, 1, 16, 512), math.nan, dtype=torch.bfloat16, device=CUDA)
    lse = torch.full((2, 1, 16), math.nan, device=CUDA)
    q, lengths = inputs.q.to(CUDA), inputs.lengths.to(CUDA)
    tables = Tables(table, lengths)
    case.backend("triton", CUDA).attend(q, wide, wide, tables, out, lse)
    expected = inputs.expected(case.shapes[0].scale, 512)
    expected.check(out[:, 0].cpu(), lse[:, 0].cpu())


@both_formats
def test_graph_replay_follows_its_inputs(case):
    """Other queries, tables and lengths, from nothing to every column."""
    case = evolve(case, lengths=(500, 500, 500), spare=0)
    backend, inputs = case.backend("triton", CUDA), case.make()
    q, table, lengths, pool = (
        each.to(CUDA) for each in (inputs.q, inputs.table, inputs.lengths, inputs.pool)
    )
    rows = pool[:, 1:2]
    out = torch.full((3, 1, 128, 512), math.nan, dtype=torch.bfloat16, device=CUDA)
    lse = torch.full((3, 1, 128), math.nan, device=CUDA)

    def decode():
        backend.attend(q, rows, rows, Tables(table, lengths), out, lse)

    decode()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats(CUDA)["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        decode()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats(CUDA)["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    for seed, sizes in enumerate([(500, 500, 500), (0, 1, 77), (300, 0, 0), (0, 0, 0)]):
        fresh = evolve(case, lengths=sizes, seed=seed).make()
        pool[: len(fresh.pool)].copy_(fresh.pool)
        table[:, : fresh.table.shape[1]].copy_(fresh.table)
        q.copy_(fresh.q)
        lengths.copy_(fresh.lengths)
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        expected = fresh.expected(case.shapes[0].scale, 512)
        expected.check(out[:, 0].cpu(), lse[:, 0].cpu())


@both_formats
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_reads_pinned_host_memory_in_place(case, impl):
    case = evolve(case, heads=16, unit=16, lengths=(300, 5))
    inputs = case.make()
    rows = inputs.pool.pin_memory()[:, 1:2]
    out = torch.full((2, 1, 16, 512), math.nan, dtype=torch.bfloat16, device=CUDA)
    lse = torch.full((2, 1, 16), math.nan, device=CUDA)
    q, table, lengths = (each.to(CUDA) for each in (inputs.q, inputs.table, inputs.lengths))
    case.backend(impl, CUDA).attend(q, rows, rows, Tables(table, lengths), out, lse)
    torch.cuda.synchronize()
    expected = inputs.expected(case.shapes[0].scale, 512)
    expected.check(out[:, 0].cpu(), lse[:, 0].cpu())


@pytest.mark.parametrize("share", [None, 0.2])
@pytest.mark.parametrize("heads", [16, 128])
def test_prefill_at_its_real_size(share, heads):
    case = evolve(MODEL, heads=heads)
    model, _ = case.shapes
    random = torch.Generator().manual_seed(0)
    q = (2 * torch.randn(70, heads, 576, generator=random)).bfloat16()
    k = torch.randn(300, 1, 576, generator=random).bfloat16()
    i, j = 230 + torch.arange(70), torch.arange(300)
    keep = torch.rand(70, 300, generator=random) < (share or 1.0)
    expected = expect(q, k, k[..., :512], model.scale, keep & (j <= i[:, None]))
    out = torch.full((70, heads, 512), math.nan, device=CUDA)
    lse = torch.full((70, heads), math.nan, device=CUDA)
    backend, keys = case.backend("triton", CUDA), k.to(CUDA)
    if share is None:
        backend.prefill(q.to(CUDA), keys, keys[..., :512], 230, 0, out, lse)
    else:
        backend.prefill_selected(
            q.to(CUDA), keys, keys[..., :512], 230, 0, columns_of(keep).to(CUDA), out, lse
        )
    expected.check(out.cpu(), lse.cpu())
