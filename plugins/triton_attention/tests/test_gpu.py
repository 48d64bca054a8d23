"""Cases that only a device can show: graphs, addresses beyond 2**31, host memory."""

from __future__ import annotations

import pytest
import torch

from plugins.triton_attention.tests.making import made
from topkv.types import GroupShape, LayerView, ModelShape, Plan, StepTensors, Tables

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM, UNIT = 32, 8, 128, 16


def backends(lane_heads, batch, select, requests=None):
    model = ModelShape(1, HEADS, KV_HEADS, DIM, torch.bfloat16, DIM**-0.5)
    group = GroupShape(
        (0,), UNIT, lane_heads, KV_HEADS // lane_heads, DIM, torch.bfloat16, 128,
        requests or batch, 10**4, select, select, 2,
    )  # fmt: skip
    device = torch.device("cuda")
    return group, *(made(model, group, impl, device, batch) for impl in ("triton", "reference"))


def compare(triton, reference, q, k, v, table, lengths):
    results = []
    for backend in (triton, reference):
        out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan).cuda()
        backend.attend(q, k, v, Tables(table, lengths), out, lse)
        results.append((out.float(), lse))
    (out, lse), (want, want_lse) = results
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(out, want, rtol=2 * eps, atol=eps)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lane_heads", [1, KV_HEADS])
def test_graph_replay_follows_its_inputs(lane_heads):
    batch, select = 3, 32
    group, triton, reference = backends(lane_heads, batch, select)
    lanes = batch * lane_heads
    pool = torch.randn(
        group.max_lanes * group.slots, KV_HEADS // lane_heads, 2, UNIT, DIM, device="cuda"
    ).bfloat16()
    k, v = pool[:, :, 0], pool[:, :, 1]

    def ints(*shape):
        return torch.zeros(shape, dtype=torch.int32, device="cuda")

    empty = torch.empty(0)
    step = StepTensors(ints(batch), ints(batch), empty, empty, empty, empty)
    plan = Plan(ints(lanes, select), ints(lanes), empty, empty, empty)
    view = LayerView(0, 0, group, step, empty, empty)
    tables = Tables(ints(lanes, select + 1), ints(lanes))
    # Rows are further apart than their heads, as those of a fused projection are.
    q = torch.randn(batch, 1, HEADS + 2 * KV_HEADS, DIM, device="cuda").bfloat16()[:, :, :HEADS]
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")

    def decode(backend):
        backend.adapt_page_table(view, plan, tables)
        backend.attend(q, k, v, tables, out, lse)

    decode(triton)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(triton)
    for requests in ([(0, 900), (-1, 0), (2, 1)], [(2, 513), (1, 77), (0, 5000)]):
        step.slots.copy_(torch.tensor([slot for slot, _ in requests]))
        step.lengths.copy_(torch.tensor([length for _, length in requests]))
        plan.slots.copy_(torch.argsort(torch.rand(lanes, select), -1))
        plan.count.copy_(torch.randint(0, select + 1, (lanes,)))
        q.normal_()
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        got, got_lse = out.float(), lse.clone()
        decode(reference)
        eps = torch.finfo(torch.bfloat16).eps
        torch.testing.assert_close(got, out.float(), rtol=2 * eps, atol=eps)
        torch.testing.assert_close(got_lse, lse, rtol=1e-5, atol=1e-5)


def test_addresses_beyond_2_31_elements():
    slots = 2**31 // (2 * UNIT * DIM) + 5000
    _, triton, reference = backends(KV_HEADS, 1, 64)
    pool = torch.empty(slots, 1, 2, UNIT, DIM, dtype=torch.bfloat16, device="cuda")
    assert pool.numel() > 2**31
    table = (slots - 1 - torch.randperm(4000)[: KV_HEADS * 65]).view(KV_HEADS, 65).int().cuda()
    pool[table.long()] = torch.randn(KV_HEADS, 65, 1, 2, UNIT, DIM, device="cuda").bfloat16()
    q = torch.randn(1, 1, HEADS, DIM, device="cuda").bfloat16()
    lengths = torch.full((KV_HEADS,), 64 * UNIT + 3, dtype=torch.int32, device="cuda")
    compare(triton, reference, q, pool[:, :, 0], pool[:, :, 1], table, lengths)


def test_prefill_beyond_2_31_elements():
    _, triton, reference = backends(1, 1, 64)
    stride = 2**31 // 100
    pool = torch.empty(stride * 127 + KV_HEADS * DIM, dtype=torch.bfloat16, device="cuda")
    k = pool.as_strided((128, KV_HEADS, DIM), (stride, DIM, 1)).normal_()
    q = torch.randn(128, HEADS, DIM, device="cuda").bfloat16()
    results = []
    for backend in (triton, reference):
        out, lse = torch.empty(128, HEADS, DIM).cuda(), torch.empty(128, HEADS).cuda()
        backend.prefill(q, k, k, 0, 0, out, lse)
        results.append((out, lse))
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(results[0][0], results[1][0], rtol=2 * eps, atol=2 * eps)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-5, atol=1e-5)


def test_reads_pinned_host_memory_in_place():
    batch = 2
    _, triton, reference = backends(1, batch, 64)
    pool = torch.randn(200, KV_HEADS, 2, UNIT, DIM).bfloat16().pin_memory()
    table = torch.randperm(200)[:130].view(batch, 65).int().cuda()
    lengths = torch.tensor([1000, 65 * UNIT], dtype=torch.int32, device="cuda")
    q = torch.randn(batch, 1, HEADS, DIM, device="cuda").bfloat16()
    compare(triton, reference, q, pool[:, :, 0], pool[:, :, 1], table, lengths)
